"""The Triton implementations of the ops; importing this module puts them in the place of the references on CUDA.

They decline, and the reference runs, where a head size is not a multiple of 16 or larger than 256. Host tensors that
they are given must be pinned: the kernels reach them by address. Triton's launcher takes a pinned CPU tensor like a
CUDA tensor, and refuses another. Under TRITON_INTERPRET=1 the same functions work on CPU tensors.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sglang_oasis.ops import device_step, triton_launches
from sglang_oasis.ops.device_step import DeviceAdmissions, StepTable
from sglang_oasis.ops.eviction import Maps
from sglang_oasis.ops.smoothing import ESCAPE
from sglang_oasis.ops.summary import SummaryFormat

HEAD_DIM_STEP, HEAD_DIM_MOST = 16, 256


def serves(head_dim: int) -> bool:
    """Whether the kernels can work on heads of this size."""
    return head_dim % HEAD_DIM_STEP == 0 and head_dim <= HEAD_DIM_MOST


@device_step.take_tokens.register("cuda")
def take_tokens(
    blocks: Tensor,
    maps: Maps,
    summaries: Tensor,
    host_kv: Tensor,
    host_summaries: Tensor,
    req_to_token: Tensor,
    table: StepTable,
    indices: Tensor,
    keys: Tensor,
    values: Tensor,
    first: int,
    fmt: SummaryFormat,
) -> None:
    if not serves(blocks.shape[-1]):
        return NotImplemented
    triton_launches.take_tokens(
        blocks, maps, summaries, host_kv, host_summaries, req_to_token, table, indices, keys, values, first, fmt
    ).run()
    return None


@device_step.score_blocks.register("cuda")
def score_blocks(
    queries: Tensor,
    summaries: Tensor,
    rows: Tensor,
    candidates: Tensor,
    fmt: SummaryFormat,
    scale: float,
    tightness: float,
    averages: Tensor | None,
    decay: float,
    sinks: int,
    escape: float = ESCAPE,
) -> Tensor:
    if not serves(queries.shape[-1]):
        return NotImplemented
    scores = torch.empty((len(rows), *summaries.shape[1:3]), device=queries.device)
    for launch in triton_launches.score_blocks(
        queries, summaries, rows, candidates, fmt, scale, tightness, averages, decay, sinks, escape, scores
    ):
        launch.run()
    return scores


@device_step.select_admissions.register("cuda")
def select_admissions(
    predicted: Tensor,
    candidates: Tensor,
    rows: Tensor,
    maps: Maps,
    number: Tensor,
    offset: int,
    cap: Tensor,
    admissions: DeviceAdmissions,
    counters: Tensor,
) -> None:
    triton_launches.select_admissions(
        predicted, candidates, rows, maps, number, offset, cap, admissions, counters
    ).run()


@device_step.fetch_blocks.register("cuda")
def fetch_blocks(
    blocks: Tensor,
    maps: Maps,
    host_kv: Tensor,
    req_to_token: Tensor,
    rows: Tensor,
    admissions: DeviceAdmissions,
    number: Tensor,
    offset: int,
) -> None:
    if not serves(blocks.shape[-1]):
        return NotImplemented
    triton_launches.fetch_blocks(blocks, maps, host_kv, req_to_token, rows, admissions, number, offset).run()
    return None


@device_step.attend.register("cuda")
def attend(
    query: Tensor,
    blocks: Tensor,
    rows: Tensor,
    slots: Tensor,
    kv_lengths: Tensor,
    query_starts: Tensor,
    scale: float,
    max_queries: int,
) -> Tensor:
    if not serves(query.shape[-1]):
        return NotImplemented
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    triton_launches.attend(query, blocks, rows, slots, kv_lengths, query_starts, scale, max_queries, out).run()
    return out


@device_step.summarise_blocks.register("cuda")
def summarise_blocks(kv: Tensor, sources: Tensor, records: Tensor, targets: Tensor, fmt: SummaryFormat) -> None:
    if not serves(kv.shape[-1]):
        return NotImplemented
    triton_launches.summarise_blocks(kv, sources, records, targets, fmt).run()
    return None
