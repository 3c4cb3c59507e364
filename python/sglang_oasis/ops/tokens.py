"""Writes new K and V into blocks: of the host pool (write-through), and of the resident tier's local slots."""

from __future__ import annotations

from torch import Tensor

from sglang_oasis.ops.dispatch import device_op


@device_op
def store_tokens(blocks: Tensor, rows: Tensor | None, positions: Tensor, keys: Tensor, values: Tensor) -> None:
    """Store tokens in blocks, converted to the dtype of `blocks`.

    Args:
        blocks: [S, H, P, 2, B, D] with `rows`, or pages [N, H, 2, B, D] without.
        rows: [T] int64, row of each token, or None.
        positions: [T] int64, slot (or page) * B + offset of each token.
        keys, values: [T, H, D].
    """
    slot, offset = positions // blocks.shape[-2], positions % blocks.shape[-2]
    for half, vectors in enumerate((keys, values)):
        if rows is None:
            blocks[slot, :, half, offset] = vectors.to(blocks)
        else:
            blocks[rows, :, slot, half, offset] = vectors.to(blocks)
