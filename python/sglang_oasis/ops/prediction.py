"""From lookahead queries to the blocks to fetch: score, take the K best, compare with the resident blocks."""

from __future__ import annotations

import torch
from torch import Tensor

from sglang_oasis.ops.device_step import Admitting, Among, LayerState, Mark, Ranking, score_blocks, select_admissions
from sglang_oasis.ops.dispatch import device_op


@device_op
def predict_admissions(
    queries: Tensor, layer: LayerState, among: Among, ranking: Ranking, mark: Mark, admitting: Admitting
) -> None:
    """Run `score_blocks`, take the K best by `torch.topk`, and run `select_admissions`; those explain the arguments.

    Blocks of equal score may rank in any order. `layer.averages` are updated, unless they are None.
    """
    scores = score_blocks(queries, layer.summaries, among, ranking, layer.averages)
    predicted = torch.topk(scores, layer.maps.head_map.shape[-1], dim=-1).indices
    select_admissions(predicted, among, layer.maps, mark, admitting)
