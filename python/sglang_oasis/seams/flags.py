"""Reads the settings of our backends from a ServerArgs.

Read from sglang 0.5.23: `arg_groups/overrides.resolved_view`.
"""

from __future__ import annotations

from typing import Any

from sglang_oasis.config import DENSE_BACKEND_NAME, ENABLE_FLAG, KNOBS, LookaheadKVConfig, Speculation

EAGLE3, NGRAM = "EAGLE3", "NGRAM"
"""The speculative algorithms of SGLang whose chains of drafts our backends can verify."""


def enabled(server_args: Any) -> bool:
    """Whether this ServerArgs asks for lookahead KV."""
    return bool(getattr(server_args, ENABLE_FLAG, False))


def dense(server_args: Any) -> bool:
    """Whether this ServerArgs asks for the dense CPU backend, without lookahead KV."""
    return not enabled(server_args) and server_args.attention_backend == DENSE_BACKEND_NAME


def uses_host_pool(server_args: Any) -> bool:
    """Whether this ServerArgs asks for one of our backends, which both need the seams and the host pool."""
    return enabled(server_args) or dense(server_args)


def config_of(server_args: Any, block_size: int) -> LookaheadKVConfig:
    """Return the validated configuration of a ServerArgs whose page size is resolved.

    Raises:
        LookaheadKVError: a flag has an invalid value.
    """
    flags = {knob.name: getattr(server_args, knob.name) for knob in KNOBS}
    return LookaheadKVConfig.from_flags(flags, block_size, speculation_of(server_args))


def speculation_of(server_args: Any) -> Speculation:
    """Return how a ServerArgs speculates, as far as it is resolved."""
    from sglang.srt.arg_groups.overrides import resolved_view

    view = resolved_view(server_args)
    algorithm = algorithm_of(view)
    return Speculation(algorithm, (view.speculative_num_draft_tokens or 1) - 1) if algorithm else Speculation()


def algorithm_of(server_args: Any) -> str | None:
    """Return --speculative-algorithm in capitals; SGLang accepts either case and resolves it after our first checks."""
    algorithm = server_args.speculative_algorithm
    return None if algorithm is None else algorithm.upper()
