"""Entry points that SGLang calls in every process (groups `sglang.srt.platforms` and `sglang.srt.plugins`).

`register` adds the flags and nothing else. The seams are installed when a ServerArgs with `enable_lookahead_kv`, or
with the attention backend `oasis_cpu`, comes into being, in the launcher as in each child process that unpickles it;
without one, stock SGLang runs untouched.
"""

from __future__ import annotations


def activate_platform() -> str | None:
    """The CPU platform's class path on a machine without an accelerator that SGLang serves itself, else None."""
    from sglang_oasis.serving.cpu_platform.detect import cpu_platform_wanted

    return "sglang_oasis.serving.cpu_platform.cpu.OasisCpuPlatform" if cpu_platform_wanted() else None


def register() -> None:
    """Add the lookahead KV flags to SGLang's ServerArgs."""
    from sglang_oasis.seams import activation, server_args

    server_args.install()
    activation.plugins_loaded()
