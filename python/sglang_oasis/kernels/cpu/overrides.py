"""The C++ implementations of the ops; importing this module registers them for CPU tensors.

They return NotImplemented, so that the reference runs, if the kernels are not loaded or D is no multiple of 16.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sglang_oasis.kernels.cpu.native import kernels
from sglang_oasis.ops.attention import paged_attention
from sglang_oasis.ops.eviction import Admissions, Maps, admit_blocks, graduate_blocks, select_blocks
from sglang_oasis.ops.smoothing import ESCAPE, smooth_scores
from sglang_oasis.ops.summary import SummaryFormat, block_scores, summarise_pages
from sglang_oasis.ops.tokens import store_tokens

HEAD_DIM_STEP, HEAD_DIM_MOST = 16, 512


def serves(head_dim: int) -> bool:
    """Whether the kernels are loaded and support heads of this size."""
    return kernels() is not None and head_dim % HEAD_DIM_STEP == 0 and head_dim <= HEAD_DIM_MOST


def _heads_side_by_side(tokens: Tensor) -> Tensor:
    """Return tokens [T, heads, D] such that each token is contiguous; the tokens may have any stride."""
    _, heads, head_dim = tokens.shape
    whole = tokens.stride(2) == 1 and (heads == 1 or tokens.stride(1) == head_dim)
    return tokens if whole else tokens.contiguous()


@paged_attention.register("cpu")
def _paged_attention(
    query: Tensor, blocks: Tensor, rows: Tensor, slots: Tensor, kv_lengths: Tensor, query_starts: Tensor, scale: float
) -> Tensor:
    if not serves(query.shape[-1]):
        return NotImplemented
    out = torch.empty(query.shape, dtype=query.dtype)
    query = _heads_side_by_side(query)
    kernels().paged_attention(query, blocks, rows, slots, kv_lengths, query_starts, scale, out)
    return out


@store_tokens.register("cpu")
def _store_tokens(blocks: Tensor, rows: Tensor | None, positions: Tensor, keys: Tensor, values: Tensor) -> None:
    if not serves(keys.shape[-1]) or keys.device.type != "cpu":
        return NotImplemented
    keys, values = _heads_side_by_side(keys), _heads_side_by_side(values)
    if rows is None:
        kernels().store_host_tokens(blocks, positions, keys, values)
    else:
        kernels().store_resident_tokens(blocks, rows, positions, keys, values)
    return None


@summarise_pages.register("cpu")
def _summarise_pages(host_kv: Tensor, pages: Tensor, fmt: SummaryFormat, records: Tensor) -> None:
    if not serves(host_kv.shape[-1]):
        return NotImplemented
    kernels().summarise(host_kv, pages, fmt.bits, fmt.scaling, records)
    return None


@block_scores.register("cpu")
def _block_scores(
    queries: Tensor, records: Tensor, fmt: SummaryFormat, candidates: Tensor, scale: float, tightness: float
) -> Tensor:
    if not serves(queries.shape[-1]):
        return NotImplemented
    scores = torch.empty(records.shape[:3])
    kernels().score_blocks(queries.contiguous(), records, fmt.bits, fmt.scaling, candidates, scale, tightness, scores)
    return scores


@smooth_scores.register("cpu")
def _smooth_scores(
    averages: Tensor, rows: Tensor, scores: Tensor, candidates: Tensor, decay: float, escape: float = ESCAPE
) -> None:
    if kernels() is None or not scores.is_contiguous():
        return NotImplemented
    kernels().smooth_scores(averages, rows, scores, candidates, decay, escape)
    return None


@select_blocks.register("cpu")
def _select_blocks(scores: Tensor, candidates: Tensor, rows: Tensor, maps: Maps, step: int, cap: int) -> Admissions:
    if kernels() is None:
        return NotImplemented
    shape = (*scores.shape[:2], min(cap, maps.head_map.shape[-1]))
    blocks, slots = torch.empty(2, *shape, dtype=torch.int32)
    deferred = kernels().select_blocks(scores.float().contiguous(), candidates, rows, *maps, step, blocks, slots)
    return Admissions(blocks, slots, deferred)


@admit_blocks.register("cpu")
def _admit_blocks(
    blocks: Tensor, maps: Maps, host_kv: Tensor, pages: Tensor, rows: Tensor, admissions: Admissions, step: int
) -> None:
    if not serves(blocks.shape[-1]):
        return NotImplemented
    kernels().admit_blocks(host_kv, pages, rows, admissions.blocks, admissions.slots, blocks, *maps, step)
    return None


@graduate_blocks.register("cpu")
def _graduate_blocks(
    blocks: Tensor, maps: Maps, rows: Tensor, graduates: Tensor, local_slots: Tensor, step: int
) -> None:
    if not serves(blocks.shape[-1]):
        return NotImplemented
    kernels().graduate_blocks(blocks, *maps, rows, graduates, local_slots, step)
    return None
