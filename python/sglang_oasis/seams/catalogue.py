"""The list of hooks, and the check that all are installed, because SGLang only logs errors of plugins and hooks."""

from __future__ import annotations

from importlib.metadata import version

from sglang_oasis import SUPPORTED_SGLANG_VERSION
from sglang_oasis.errors import LookaheadKVError
from sglang_oasis.seams import (
    attention_backend,
    beam_search,
    control_requests,
    cpu_topology,
    dtypes,
    forward_batch,
    fused_kv_write,
    gloo_device,
    hidden_states,
    http_server,
    idle_controller,
    internal_state,
    kv_pool,
    logit_processors,
    parent_death,
    post_capture_sizing,
    request_validation,
    resolution,
    running_batch,
    sampling,
    shared_expert,
    sizing,
    speculation,
    stop_regex,
    termination,
)
from sglang_oasis.seams.seam import Seam, not_installed

_MODULES = (
    dtypes,
    cpu_topology,
    kv_pool,
    sizing,
    post_capture_sizing,
    forward_batch,
    fused_kv_write,
    gloo_device,
    beam_search,
    internal_state,
    running_batch,
    sampling,
    hidden_states,
    logit_processors,
    speculation,
    shared_expert,
    http_server,
    idle_controller,
    request_validation,
    control_requests,
    stop_regex,
    parent_death,
    termination,
)


def seams() -> list[Seam]:
    """Return every hook of this package except the one on ServerArgs."""
    return [seam for module in _MODULES for seam in module.SEAMS]


def install() -> None:
    """Register and apply all hooks, the resolution steps and the attention backend."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookSource, HookType

    _check_version()
    resolution.install()
    attention_backend.install(verify)
    speculation.install()
    source = HookSource(plugin_name="sglang_oasis", dist_name="sglang-oasis")
    for seam in seams():
        HookRegistry.register(seam.path, seam.hook, HookType[seam.kind], source=source)
    HookRegistry.apply_hooks()


def verify() -> None:
    """Fail if a hook is not installed.

    Raises:
        LookaheadKVError: a hook is not installed; the message names the symbol.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry

    speculation.verify()
    for seam in seams():
        hooks = HookRegistry._hooks.get(seam.path, [])
        if seam.path not in HookRegistry._patched or not any(hook is seam.hook for _, hook, _ in hooks):
            raise not_installed(f"the hook on {seam.path}")


def _check_version() -> None:
    found = version("sglang")
    if found.split("+")[0] != SUPPORTED_SGLANG_VERSION:
        raise LookaheadKVError(
            f"sglang-oasis needs sglang=={SUPPORTED_SGLANG_VERSION}, found {found}: install that version."
        )
