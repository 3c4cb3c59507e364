"""Entry points that SGLang calls in every process (groups `sglang.srt.platforms` and `sglang.srt.plugins`).

`register` only adds the flags. The seams are installed when a ServerArgs with `enable_lookahead_kv`, or with the
attention backend `oasis_cpu`, is created, in the launcher and in each child process that unpickles it; otherwise stock
SGLang runs unchanged.
"""

from __future__ import annotations


def activate_platform() -> str | None:
    """Return the class path of our CPU platform if the machine needs it (`cpu_platform_wanted`), else None."""
    from sglang_oasis.serving.cpu_platform.detect import cpu_platform_wanted

    return "sglang_oasis.serving.cpu_platform.cpu.OasisCpuPlatform" if cpu_platform_wanted() else None


def register() -> None:
    """Add the lookahead KV flags to SGLang's ServerArgs."""
    from sglang_oasis.seams import activation, server_args

    server_args.install()
    activation.plugins_loaded()
