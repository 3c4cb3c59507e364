"""From a lookahead query to what is to be fetched: score, take the K best, compare with what is resident."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from sglang_oasis.ops.device_step import DeviceAdmissions, score_blocks, select_admissions
from sglang_oasis.ops.dispatch import device_op
from sglang_oasis.ops.eviction import Maps
from sglang_oasis.ops.summary import SummaryFormat


class Ranking(NamedTuple):
    """How blocks are ranked.

    Attributes:
        fmt: how summaries are stored.
        scale: softmax scale of the attention.
        tightness: factor of the half range, see `block_scores`.
        decay: weight of the past in the average scores.
        sinks: first blocks that are always selected.
    """

    fmt: SummaryFormat
    scale: float
    tightness: float
    decay: float
    sinks: int


@device_op
def predict_admissions(
    queries: Tensor,
    summaries: Tensor,
    averages: Tensor | None,
    maps: Maps,
    rows: Tensor,
    candidates: Tensor,
    ranking: Ranking,
    number: Tensor,
    offset: int,
    cap: Tensor,
    admissions: DeviceAdmissions,
    counters: Tensor,
) -> None:
    """`score_blocks`, the K best by `torch.topk`, `select_admissions`; whose docstrings explain the arguments.

    Blocks of equal score rank in any order here.
    """
    scores = score_blocks(
        queries, summaries, rows, candidates, ranking.fmt, ranking.scale, ranking.tightness, averages, ranking.decay,
        ranking.sinks,
    )  # fmt: skip
    predicted = torch.topk(scores, maps.head_map.shape[-1], dim=-1).indices
    select_admissions(predicted, candidates, rows, maps, number, offset, cap, admissions, counters)
