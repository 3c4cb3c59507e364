"""The list of hooks, and the check that each one took: SGLang logs and ignores errors of plugins and hooks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sglang_oasis import SUPPORTED_SGLANG_VERSION
from sglang_oasis.errors import LookaheadKVError

_PACKAGES = ("sglang", "multiprocessing", "uvicorn")


@dataclass(frozen=True)
class Seam:
    """A hook on an SGLang symbol.

    Attributes:
        target: dotted path below `sglang.srt`, or from a package's name on: `sglang`, or one that SGLang builds on.
        hook: the hook function, with the signature that SGLang prescribes for `kind`.
        kind: "BEFORE", "AFTER", "AROUND" or "REPLACE".
    """

    target: str
    hook: Callable[..., Any]
    kind: str

    @property
    def path(self) -> str:
        return self.target if self.target.split(".")[0] in _PACKAGES else f"sglang.srt.{self.target}"


def seams() -> list[Seam]:
    """Every hook of this package but the one on ServerArgs."""
    from sglang_oasis.seams import (
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
        running_batch,
        sampling,
        shared_expert,
        sizing,
        speculation,
        stop_regex,
        termination,
    )

    return [
        *dtypes.SEAMS,
        *cpu_topology.SEAMS,
        *kv_pool.SEAMS,
        *sizing.SEAMS,
        *post_capture_sizing.SEAMS,
        *forward_batch.SEAMS,
        *fused_kv_write.SEAMS,
        *gloo_device.SEAMS,
        *beam_search.SEAMS,
        *internal_state.SEAMS,
        *running_batch.SEAMS,
        *sampling.SEAMS,
        *hidden_states.SEAMS,
        *logit_processors.SEAMS,
        *speculation.SEAMS,
        *shared_expert.SEAMS,
        *http_server.SEAMS,
        *idle_controller.SEAMS,
        *request_validation.SEAMS,
        *control_requests.SEAMS,
        *stop_regex.SEAMS,
        *parent_death.SEAMS,
        *termination.SEAMS,
    ]


def install() -> None:
    """Register and apply all hooks, the resolution steps and the attention backend."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookSource, HookType

    from sglang_oasis.seams import attention_backend, resolution, speculation

    _check_version()
    resolution.install()
    attention_backend.install()
    speculation.install()
    source = HookSource(plugin_name="sglang_oasis", dist_name="sglang-oasis")
    for seam in seams():
        HookRegistry.register(seam.path, seam.hook, HookType[seam.kind], source=source)
    HookRegistry.apply_hooks()


def verify() -> None:
    """Fail when a hook is not in place.

    Raises:
        LookaheadKVError: names the symbol.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry

    from sglang_oasis.seams import speculation

    speculation.verify()
    for seam in seams():
        hooks = HookRegistry._hooks.get(seam.path, [])
        if seam.path not in HookRegistry._patched or not any(hook is seam.hook for _, hook, _ in hooks):
            raise did_not_take(f"the hook on {seam.path}")


def did_not_take(what: str) -> LookaheadKVError:
    """The error for something of ours that is not in place inside SGLang."""
    return LookaheadKVError(
        f"sglang-oasis cannot start: {what} did not take; install sglang=={SUPPORTED_SGLANG_VERSION}, or remove the "
        f"plugin that occupies it."
    )


def _check_version() -> None:
    from importlib.metadata import version

    found = version("sglang")
    if found.split("+")[0] != SUPPORTED_SGLANG_VERSION:
        raise LookaheadKVError(
            f"sglang-oasis needs sglang=={SUPPORTED_SGLANG_VERSION}, found {found}: install that version."
        )
