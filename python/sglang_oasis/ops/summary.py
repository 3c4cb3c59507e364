"""Block summaries: what ranks a block without reading its keys (Quest-style bounds, OasisKV section 3.2)."""

from __future__ import annotations

import torch
from torch import Tensor

from sglang_oasis.ops.dispatch import device_op

SUMMARY_DTYPE = torch.bfloat16


@device_op
def block_bounds(keys: Tensor) -> Tensor:
    """Coordinate-wise minimum and maximum of the keys of each block.

    Args:
        keys: [..., B, D], completed blocks.

    Returns:
        [..., 2, D] bfloat16, index 0 the minimum and 1 the maximum.
    """
    return torch.stack(torch.aminmax(keys, dim=-2), dim=-2).to(SUMMARY_DTYPE)


@device_op
def bound_scores(query: Tensor, bounds: Tensor) -> Tensor:
    """Upper bound of the dot product of a query with any key of a block: sum_d max(q_d*min_d, q_d*max_d).

    Args:
        query: [n, H, M, D].
        bounds: [n, H, N, 2, D] bfloat16.

    Returns:
        [n, H, M, N] float32.
    """
    query = query.float()
    signed = torch.cat([query.clamp(max=0), query.clamp(min=0)], dim=-1)
    return torch.matmul(signed, bounds.flatten(-2).float().transpose(-1, -2))
