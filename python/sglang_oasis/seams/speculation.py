"""Enables speculation on our backends: the draft model's attention, and on a CPU the ops that SGLang has for GPUs only.

Read from sglang 0.5.23: `speculative/draft_utils.DraftBackendFactory`, `arg_groups/speculative_hook.py`,
`speculative/eagle_utils.eagle_sample`, `speculative/cpp_ngram/ngram_corpus.NgramCorpus`, and the modules that
`serving/cpu_platform/speculative.py` names. A REPLACE hook installs a stand-in where SGLang's op exists; an op that
cannot be imported without SGLang's compiled kernels (`reconstruct_tree`) is set here, and `verify` checks it.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from typing import Any

from sglang_oasis.config import BACKEND_NAME, DENSE_BACKEND_NAME, DUAL_ALGORITHM
from sglang_oasis.seams.flags import EAGLE3, uses_host_pool
from sglang_oasis.seams.running_batch import looks_back
from sglang_oasis.seams.seam import Seam, not_installed
from sglang_oasis.serving.cpu_platform import speculative as ops
from sglang_oasis.serving.cpu_platform.detect import cpu_platform_wanted
from sglang_oasis.serving.drafting import DraftSteps
from sglang_oasis.serving.sampling.verification import verify as verify_by_sampling
from sglang_oasis.serving.speculative.chains import longest_chains

_RECONSTRUCT = "sglang.kernels.ops.speculative.reconstruct_tree"
_RECONSTRUCT_FUNCTION = "reconstruct_indices_from_tree_mask_func"


def _keep_overlap(original: Callable[[Any], None], server_args: Any) -> None:
    """Keep the overlap of scheduling and speculation, which SGLang turns off because its CPU engine lacks it."""
    if not uses_host_pool(server_args):
        original(server_args)


def _last_loc_on_torch(original: Callable[..., Any], *args: Any) -> Any:
    """Use SGLang's torch version of this op, which SGLang uses for its own backends only."""
    from sglang.srt.mem_cache.allocation import get_last_loc_torch

    return get_last_loc_torch(*args)


def _draft_decode_backend(original: Callable[[Any], Any], factory: Any) -> Any:
    if not _serves(factory):
        return original(factory)
    steps = factory.speculative_num_steps - 1  # the first draft comes from the draft model's extend pass
    return DraftSteps(factory.draft_model_runner.attn_backend, steps) if steps > 0 else None


def _draft_extend_backend(original: Callable[[Any], Any], factory: Any) -> Any:
    # None: the draft model keeps its own backend.
    return None if _serves(factory) else original(factory)


def _serves(factory: Any) -> bool:
    from sglang.srt.runtime_context import attention_backends

    name = factory.draft_attn_backend or attention_backends()[1]
    return name in (DENSE_BACKEND_NAME, BACKEND_NAME)


def _accept_or_reject(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Accept no draft if drafts serve only as lookahead queries; the token sampled at the root is the output."""
    predict, accept_lens, accept_index = verify_by_sampling(original, looks_back(), *args, **kwargs)
    if rejects_drafts():
        accept_lens.fill_(1)
        accept_index[:, 1:] = -1
    return predict, accept_lens, accept_index


def _draft_chains(original: Callable[..., Any], corpus: Any, *args: Any, **kwargs: Any) -> Any:
    tokens, mask = original(corpus, *args, **kwargs)
    return longest_chains(tokens, mask, corpus.draft_token_num)


def rejects_drafts() -> bool:
    """Whether this server uses its drafts only to look ahead."""
    from sglang.srt.runtime_context import get_server_args, get_spec

    return get_server_args().lookahead_kv_reject_drafts or get_spec().speculative_algorithm == DUAL_ALGORITHM


def install() -> None:
    """Register the dual-token algorithm, and install the stand-ins that are not hooks."""
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    from sglang_oasis.serving.speculative.dual import DualAlgorithm, DualWorker

    SpeculativeAlgorithm.register(DUAL_ALGORITHM, supports_overlap=True, spec_class=DualAlgorithm)(lambda _: DualWorker)
    if not cpu_platform_wanted():
        return
    from sglang_oasis.serving.cpu_platform.cpu import OasisCpuPlatform

    OasisCpuPlatform.drafted_algorithms = (EAGLE3,)
    if _RECONSTRUCT not in sys.modules:
        module = types.ModuleType(_RECONSTRUCT)
        setattr(module, _RECONSTRUCT_FUNCTION, ops.reconstruct_indices_from_tree_mask)
        sys.modules[_RECONSTRUCT] = module


def verify() -> None:
    """Fail if a stand-in is not installed.

    Raises:
        LookaheadKVError: a stand-in is not installed; the message names the symbol.
    """
    if not cpu_platform_wanted():
        return
    found = getattr(sys.modules.get(_RECONSTRUCT), _RECONSTRUCT_FUNCTION, None)
    if found is not ops.reconstruct_indices_from_tree_mask:
        raise not_installed(f"its stand-in for {_RECONSTRUCT}.{_RECONSTRUCT_FUNCTION}")


_ON_CPU = [
    Seam("arg_groups.speculative_hook._disable_overlap_schedule_for_cpu", _keep_overlap, "AROUND"),
    Seam("mem_cache.allocation.get_last_loc", _last_loc_on_torch, "AROUND"),
    Seam("mem_cache.allocation.assign_req_to_token_pool_func", ops.assign_req_to_token_pool, "REPLACE"),
    *(
        Seam(f"sglang.kernels.ops.speculative.{target}", stand_in, "REPLACE")
        for target, stand_in in (
            ("cache_locs.assign_draft_cache_locs_contiguous_func", ops.assign_draft_cache_locs_contiguous),
            ("cache_locs.fill_front_out_cache_loc_func", ops.fill_front_out_cache_loc),
            ("eagle.fill_accept_out_cache_loc_func", ops.fill_accept_out_cache_loc),
            ("eagle.fill_bonus_tokens_func", ops.fill_bonus_tokens),
            ("gather_spec_extras.gather_spec_extras", ops.gather_spec_extras),
            ("spec_tree.build_tree_kernel_efficient_func", ops.build_tree),
            ("spec_tree.verify_tree_greedy_func", ops.verify_tree_greedy),
        )
    ),
]
SEAMS = [
    Seam("speculative.draft_utils.DraftBackendFactory.create_decode_backend", _draft_decode_backend, "AROUND"),
    Seam("speculative.draft_utils.DraftBackendFactory.create_draft_extend_backend", _draft_extend_backend, "AROUND"),
    Seam("speculative.eagle_utils.eagle_sample", _accept_or_reject, "AROUND"),
    Seam("speculative.cpp_ngram.ngram_corpus.NgramCorpus.batch_get", _draft_chains, "AROUND"),
    *(_ON_CPU if cpu_platform_wanted() else []),
]
