"""Defaults and validation inside SGLang's resolution of its arguments.

Read from sglang 0.5.23: `arg_groups/pipeline.py` (order of the steps), `arg_groups/resolution_hooks.py`,
`arg_groups/overrides.declare_resolution`. Steps are wrapped, not replaced: the previous step always runs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_oasis.config import BACKEND_NAME, DEFAULT_BLOCK_SIZE, DENSE_BACKEND_NAME, DUAL, DUAL_ALGORITHM
from sglang_oasis.seams.dtypes import choose_dtypes
from sglang_oasis.seams.flags import EAGLE3, algorithm_of, enabled, uses_host_pool
from sglang_oasis.seams.preflight import check_after_resolution, check_model
from sglang_oasis.serving.cpu_platform.detect import cpu_platform_wanted

Step = Callable[[Any], None]
SOURCE = "lookahead_kv"
DRAFT_STEPS = 3
"""Tokens that EAGLE-3 drafts per step if no flag sets them."""


def install() -> None:
    """Wrap the resolution steps that lookahead KV changes."""
    from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook

    register_resolution_hook("handle_missing_default_values")(_set_defaults)
    register_resolution_hook("handle_model_specific_adjustments")(_check_model_first)
    register_resolution_hook("handle_other_validations")(_validate)


def _set_defaults(server_args: Any, previous: Step) -> None:
    """Set our defaults before SGLang sets platform, model or attention defaults."""
    if uses_host_pool(server_args):
        from sglang.srt.arg_groups.overrides import declare_resolution, resolving_view

        view = resolving_view(server_args)
        page_size = view.page_size
        declare_resolution(
            server_args,
            SOURCE,
            attention_backend=BACKEND_NAME if enabled(server_args) else DENSE_BACKEND_NAME,
            page_size=DEFAULT_BLOCK_SIZE if page_size is None else page_size,
            **graph_defaults(view.device),
            **_dual_algorithm(server_args),
            **_chain_defaults(view),
        )
    previous(server_args)
    if uses_host_pool(server_args):
        _sleep_when_idle(server_args)


def _sleep_when_idle(server_args: Any) -> None:
    """Make an idle scheduler sleep on a CPU, so that it takes no core from other processes; needs the device."""
    from sglang.srt.arg_groups.overrides import declare_resolution, resolving_view

    view = resolving_view(server_args)
    if view.sleep_on_idle is None:
        declare_resolution(server_args, SOURCE, sleep_on_idle=view.device == "cpu")


def graph_defaults(device: str | None) -> dict[str, bool]:
    """Return the defaults that turn CUDA graphs off on a CPU, where steps cannot be captured; `device` may be None."""
    on_cpu = cpu_platform_wanted() if device is None else device == "cpu"
    return {"disable_cuda_graph": True} if on_cpu else {}


def _dual_algorithm(server_args: Any) -> dict[str, str]:
    """Return the flags for source `dual`, which SGLang must run as a speculative algorithm."""
    asked = enabled(server_args) and server_args.lookahead_kv_source == DUAL
    return {"speculative_algorithm": DUAL_ALGORITHM} if asked else {}


def _chain_defaults(view: Any) -> dict[str, int]:
    """Return EAGLE-3's missing flags; SGLang's own defaults may draft a tree, and it accepts only all of them or none.

    If steps and draft tokens contradict each other, SGLang uses the steps.
    """
    if algorithm_of(view) != EAGLE3:
        return {}
    steps, tokens = view.speculative_num_steps, view.speculative_num_draft_tokens
    if steps is None:
        steps = DRAFT_STEPS if tokens is None else tokens - 1
    chain = {
        "speculative_num_steps": steps,
        "speculative_eagle_topk": 1,
        "speculative_num_draft_tokens": steps + 1,
    }
    return {field: value for field, value in chain.items() if getattr(view, field) is None}


def _check_model_first(server_args: Any, previous: Step) -> None:
    """Check the model before SGLang asserts, for some models, that it knows the attention backend for them.

    This is also before anything depends on the model's dtype.
    """
    if uses_host_pool(server_args):
        check_model(server_args)
        choose_dtypes(server_args)
    previous(server_args)


def _validate(server_args: Any, previous: Step) -> None:
    previous(server_args)
    if uses_host_pool(server_args):
        check_after_resolution(server_args)
