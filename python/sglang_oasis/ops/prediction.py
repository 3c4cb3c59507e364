"""From a lookahead query to what is to be fetched: score, take the K best, compare with what is resident."""

from __future__ import annotations

import torch
from torch import Tensor

from sglang_oasis.ops.device_step import Admitting, Among, LayerState, Mark, Ranking, score_blocks, select_admissions
from sglang_oasis.ops.dispatch import device_op


@device_op
def predict_admissions(
    queries: Tensor, layer: LayerState, among: Among, ranking: Ranking, mark: Mark, admitting: Admitting
) -> None:
    """`score_blocks`, the K best by `torch.topk`, `select_admissions`, whose docstrings explain the arguments.

    Blocks of equal score rank in any order here. `layer.averages` are updated, where there are any.
    """
    scores = score_blocks(queries, layer.summaries, among, ranking, layer.averages)
    predicted = torch.topk(scores, layer.maps.head_map.shape[-1], dim=-1).indices
    select_admissions(predicted, among, layer.maps, mark, admitting)
