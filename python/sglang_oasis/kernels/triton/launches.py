"""How each Triton kernel is launched for given tensors: grid, arguments, tile sizes.

A launch is data. `overrides.py` runs it; `scripts/kernel_reports/compile_report.py` makes it from tensors without
memory and compiles its kernel. Nothing here reads the contents of a tensor, so a launch depends on shapes, strides
and types only.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from sglang_oasis.kernels.triton import sources
from sglang_oasis.ops.device_step import (
    Admitting,
    Among,
    DeviceAdmissions,
    LayerState,
    Mark,
    NewTokens,
    Ranking,
    StepTable,
)
from sglang_oasis.ops.eviction import Maps
from sglang_oasis.ops.summary import SummaryFormat

sources.load()

from oasis_triton import attention, fetch, scores, selection, summaries, tokens  # noqa: E402

COPY_TILE = 4096
"""Elements that a program copies in one operation."""
SCORE_TILE, RANK_TILE, TILES_AT_ONCE = 64, 256, 32
"""Blocks whose scores a program estimates and ranks; tiles whose sums it combines in one operation."""
ATTENTION_TILE = 32
"""Tokens of K and V that a program holds at a time."""
MOST_VECTORS = 64
"""Query vectors that share a tile of attention."""
LEAST_DOT = 16
"""Smallest side of a matrix in tl.dot."""

_DTYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


class Launch(NamedTuple):
    """A kernel, the programs that run it, and its arguments by name."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    warps: int = 4

    def run(self) -> None:
        self.kernel[self.grid](**self.arguments, num_warps=self.warps)


def power_of_two(n: int, least: int = 1) -> int:
    """The smallest power of two that is at least `n` and `least`."""
    return max(least, 1 << (n - 1).bit_length())


def compute_dtype(*dtypes: torch.dtype) -> tl.dtype:
    """The type in which to multiply: the operands' own if they agree; Triton's interpreter lacks bfloat16 products."""
    agree = len(set(dtypes)) == 1 and not triton.knobs.runtime.interpret
    return _DTYPES[dtypes[0]] if agree else tl.float32


def _contiguous(**tensors: Tensor) -> None:
    for name, tensor in tensors.items():
        if not tensor.is_contiguous():
            raise ValueError(f"{name} must be contiguous, got strides {tensor.stride()}.")


def _flat(**tensors: Tensor) -> None:
    for name, tensor in tensors.items():
        if tensor.stride(-1) != 1:
            raise ValueError(f"The last dimension of {name} must be contiguous, got stride {tensor.stride(-1)}.")


def take_tokens(layer: LayerState, table: StepTable, new: NewTokens, fmt: SummaryFormat) -> Launch:
    blocks, maps, summaries_, _, host_kv, host_summaries, req_to_token = layer
    indices, keys, values, first = new
    _contiguous(blocks=blocks, summaries=summaries_, host_kv=host_kv, host_summaries=host_summaries, indices=indices)
    _contiguous(**maps._asdict(), **table._asdict())
    _flat(keys=keys, values=values, req_to_token=req_to_token)
    _, heads, places, _, block_size, head_dim = blocks.shape
    n, selected, width = len(table.rows), maps.head_map.shape[-1], power_of_two(head_dim)
    drafted = len(indices) // n
    arguments = {
        "blocks": blocks,
        **maps._asdict(),
        "summaries": summaries_,
        "host_kv": host_kv,
        "host_summaries": host_summaries,
        "scaling": fmt.scaling,
        "req_to_token": req_to_token,
        "rows": table.rows,
        "lengths": table.lengths,
        "graduates": table.graduates,
        "completed": table.completed,
        "expected": table.expected,
        "number": table.number,
        "indices": indices,
        "keys": keys,
        "values": values,
        "first": first,
        "context": req_to_token.stride(0),
        "logical": maps.slot_of.shape[-1],
        "key_stride": keys.stride(0),
        "key_head_stride": keys.stride(1),
        "value_stride": values.stride(0),
        "value_head_stride": values.stride(1),
        "H": heads,
        "K": selected,
        "R": places - selected,
        "B": block_size,
        "D": head_dim,
        "M": drafted,
        "BITS": fmt.bits,
        "REC": fmt.record_bytes(head_dim),
        "TOKENS": power_of_two(drafted),
        "WIDTH": width,
        "HALF": width // 2,
        "TILE": min(COPY_TILE, power_of_two(2 * block_size * head_dim)),
    }
    return Launch(tokens.take_tokens, (heads, n), arguments)


def score_blocks(
    queries: Tensor, summaries_: Tensor, among: Among, ranking: Ranking, averages: Tensor | None, scores_: Tensor
) -> tuple[Launch, Launch]:
    """Return the two launches of `score_blocks`, and allocate the tensors between them."""
    (rows, candidates), (fmt, scale, tightness, decay, sinks, escape) = among, ranking
    _contiguous(summaries=summaries_, rows=rows, candidates=candidates)
    _flat(queries=queries)
    n, num_queries, query_heads, head_dim = queries.shape
    heads, logical = summaries_.shape[1:3]
    group = query_heads // heads
    vectors, tiles = num_queries * group, triton.cdiv(logical, SCORE_TILE)
    dot_vectors = power_of_two(vectors, LEAST_DOT)
    wide = fmt.bits == 16 or fmt.scaling is not None  # more than float16 may hold
    kept = torch.float32 if wide and queries.dtype == torch.float16 else queries.dtype
    estimates = torch.empty((n, heads, vectors, logical), device=queries.device)
    partials = torch.empty((n, heads, tiles, 2, vectors), device=queries.device)
    shared = {"rows": rows, "candidates": candidates, "estimates": estimates, "partials": partials, "logical": logical}
    estimate = {
        **shared,
        "queries": queries,
        "summaries": summaries_,
        "scaling": fmt.scaling,
        "scale": scale,
        "tightness": tightness,
        "entry_stride": queries.stride(0),
        "query_stride": queries.stride(1),
        "head_stride": queries.stride(2),
        "H": heads,
        "G": group,
        "Q": num_queries,
        "D": head_dim,
        "BITS": fmt.bits,
        "REC": fmt.record_bytes(head_dim),
        "COMPUTE": compute_dtype(kept),
        "TILE": SCORE_TILE,
        "VECTORS": dot_vectors,
        "HALF": power_of_two(head_dim // 2, LEAST_DOT),
    }
    rank = {
        **shared,
        "averages": averages,
        "scores": scores_,
        "decay": decay,
        "escape": escape,
        "sinks": sinks,
        "tiles": tiles,
        "H": heads,
        "COUNT": vectors,
        "ESTIMATE_TILE": SCORE_TILE,
        "TILE": RANK_TILE,
        "VECTORS": power_of_two(vectors),
        "AT_ONCE": TILES_AT_ONCE,
    }
    return (
        Launch(scores.estimate, (tiles, heads, n), estimate),
        Launch(scores.rank, (triton.cdiv(logical, RANK_TILE), heads, n), rank),
    )


def select_admissions(predicted: Tensor, among: Among, maps: Maps, mark: Mark, admitting: Admitting) -> Launch:
    (rows, candidates), (cap, admissions, counters) = among, admitting
    _contiguous(predicted=predicted, candidates=candidates, rows=rows, **maps._asdict())
    _contiguous(**admissions._asdict())
    n, heads, selected = predicted.shape
    most = admissions.blocks.shape[-1]
    if most > selected:
        raise ValueError(f"Admissions must be at most as wide as the {selected} selected slots, got {most}.")
    arguments = {
        "predicted": predicted,
        "candidates": candidates,
        "rows": rows,
        "last_selected": maps.last_selected,
        "slot_of": maps.slot_of,
        "number": mark.number,
        "cap": cap,
        "admitted_blocks": admissions.blocks,
        "admitted_slots": admissions.slots,
        "counters": counters,
        "offset": mark.offset,
        "logical": maps.slot_of.shape[-1],
        "H": heads,
        "K": selected,
        "C": most,
        "WIDTH": power_of_two(selected, 2),
    }
    return Launch(selection.select_admissions, (heads, n), arguments)


def fetch_blocks(layer: LayerState, rows: Tensor, admissions: DeviceAdmissions, mark: Mark) -> Launch:
    blocks, maps, host_kv, req_to_token = layer.blocks, layer.maps, layer.host_kv, layer.req_to_token
    _contiguous(blocks=blocks, host_kv=host_kv, rows=rows, **maps._asdict())
    _contiguous(**admissions._asdict())
    _flat(req_to_token=req_to_token)
    _, heads, places, _, block_size, head_dim = blocks.shape
    n, _, most = admissions.blocks.shape
    arguments = {
        "blocks": blocks,
        **maps._asdict(),
        "host_kv": host_kv,
        "req_to_token": req_to_token,
        "rows": rows,
        "admitted_blocks": admissions.blocks,
        "admitted_slots": admissions.slots,
        "number": mark.number,
        "offset": mark.offset,
        "context": req_to_token.stride(0),
        "logical": maps.slot_of.shape[-1],
        "H": heads,
        "K": maps.head_map.shape[-1],
        "P": places,
        "B": block_size,
        "D": head_dim,
        "TILE": min(COPY_TILE, power_of_two(2 * block_size * head_dim)),
    }
    return Launch(fetch.fetch_blocks, (most, heads, n), arguments)


def attend(
    query: Tensor,
    blocks: Tensor,
    rows: Tensor,
    slots: Tensor,
    kv_lengths: Tensor,
    query_starts: Tensor,
    scale: float,
    max_queries: int,
    out: Tensor,
) -> Launch:
    _contiguous(blocks=blocks, kv_lengths=kv_lengths, query_starts=query_starts)
    _flat(query=query, slots=slots)
    per_row = blocks.dim() == 6
    heads, block_size, head_dim = blocks.shape[1], blocks.shape[-2], blocks.shape[-1]
    group = query.shape[1] // heads
    vectors = min(power_of_two(max_queries * group, LEAST_DOT), MOST_VECTORS)
    arguments = {
        "query": query,
        "blocks": blocks,
        "rows": rows if per_row else None,
        "slots": slots,
        "kv_lengths": kv_lengths,
        "query_starts": query_starts,
        "out": out,
        "scale": scale,
        "query_stride": query.stride(0),
        "query_head_stride": query.stride(1),
        "slots_stride": slots.stride(0),
        "row_stride": blocks.stride(0) if per_row else 0,
        "head_stride": blocks.stride(1),
        "slot_stride": blocks.stride(2) if per_row else blocks.stride(0),
        "H": heads,
        "G": group,
        "B": block_size,
        "D": head_dim,
        "COMPUTE": compute_dtype(query.dtype),
        "VECTORS": vectors,
        "TILE": ATTENTION_TILE,
        "WIDTH": power_of_two(head_dim, LEAST_DOT),
    }
    grid = (triton.cdiv(max_queries * group, vectors), heads, len(slots))
    return Launch(attention.attend, grid, arguments, warps=8 if head_dim > 128 else 4)


def summarise_blocks(kv: Tensor, sources: Tensor, records: Tensor, targets: Tensor, fmt: SummaryFormat) -> Launch:
    _contiguous(kv=kv, sources=sources, records=records, targets=targets)
    _, heads, _, block_size, head_dim = kv.shape
    arguments = {
        "kv": kv,
        "scaling": fmt.scaling,
        "sources": sources,
        "records": records,
        "targets": targets,
        "H": heads,
        "B": block_size,
        "D": head_dim,
        "HALF": power_of_two(head_dim) // 2,
        "BITS": fmt.bits,
        "REC": fmt.record_bytes(head_dim),
    }
    return Launch(summaries.summarise_blocks, (heads, len(sources)), arguments)
