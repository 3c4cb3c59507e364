"""The Triton implementations of the ops; importing this module registers them for CUDA tensors.

They return NotImplemented, so that the reference runs, if the head size is no multiple of 16 or larger than 256. Host
tensors must be pinned, because the kernels access them by address: Triton's launcher accepts a pinned CPU tensor like
a CUDA tensor, and rejects other CPU tensors. Under TRITON_INTERPRET=1 the same functions work on CPU tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sglang_oasis.kernels.triton import launches
from sglang_oasis.kernels.triton.launches import Launch
from sglang_oasis.ops import device_step
from sglang_oasis.ops.device_step import Among, LayerState, Ranking, serves
from sglang_oasis.ops.dispatch import DeviceOp


def _launched(op: DeviceOp[..., None], make: Callable[..., Launch], *, of_heads: bool = True) -> Callable[..., None]:
    """Register an op that is one launch with the op's arguments; `of_heads`: the first argument's last size is D."""

    def run(*arguments: Any) -> None:
        first = arguments[0].blocks if isinstance(arguments[0], LayerState) else arguments[0]
        if of_heads and not serves(first.shape[-1]):
            return NotImplemented
        make(*arguments).run()
        return None

    return op.register("cuda")(run)


take_tokens = _launched(device_step.take_tokens, launches.take_tokens)
select_admissions = _launched(device_step.select_admissions, launches.select_admissions, of_heads=False)
fetch_blocks = _launched(device_step.fetch_blocks, launches.fetch_blocks)
summarise_blocks = _launched(device_step.summarise_blocks, launches.summarise_blocks)


@device_step.score_blocks.register("cuda")
def score_blocks(
    queries: Tensor, summaries: Tensor, among: Among, ranking: Ranking, averages: Tensor | None = None
) -> Tensor:
    if not serves(queries.shape[-1]):
        return NotImplemented
    scores = torch.empty((len(among.rows), *summaries.shape[1:3]), device=queries.device)
    for launch in launches.score_blocks(queries, summaries, among, ranking, averages, scores):
        launch.run()
    return scores


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
    launches.attend(query, blocks, rows, slots, kv_lengths, query_starts, scale, max_queries, out).run()
    return out
