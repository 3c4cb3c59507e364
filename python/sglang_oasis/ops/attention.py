"""Attention over blocks of K and V: of the resident tier (decode) or of the host pool (extend, dense decode)."""

from __future__ import annotations

import torch
from torch import Tensor

from sglang_oasis.ops.dispatch import device_op


@device_op
def paged_attention(
    query: Tensor,
    blocks: Tensor,
    rows: Tensor,
    slots: Tensor,
    kv_lengths: Tensor,
    query_starts: Tensor,
    scale: float,
) -> Tensor:
    """Return the exact, causal attention of sequences to their slots; all KV heads of a sequence use the same slots.

    The last tokens of a sequence are its query tokens; queries are not padded to the sequence's length, and a slot is
    read once for the whole group of query heads. Memory of a slot beyond `kv_lengths` is never read.

    Args:
        query: [T, H*G, D], the group of KV head h is heads h*G .. h*G+G-1.
        blocks: [S, H, P, 2, B, D], slots of each row; or [N, H, 2, B, D], pages, which serve as slots of every row.
        rows: [n] int64, rows of `blocks`; not used with pages.
        slots: [n, W] int32; token t of sequence i is in slot `slots[i, t // B]`.
        kv_lengths: [n] int32, tokens of each sequence, its query tokens included.
        query_starts: [n + 1] int32, the query tokens of sequence i are `query_starts[i]` to `query_starts[i + 1]`.
        scale: softmax scale.

    Returns:
        [T, H*G, D], dtype of `query`.
    """
    per_row = blocks if blocks.dim() == 6 else blocks.transpose(0, 1).unsqueeze(0).expand(len(rows), *[-1] * 5)
    table = rows if blocks.dim() == 6 else torch.arange(len(rows))
    out = torch.empty_like(query)
    starts = query_starts.tolist()
    for i, (row, length) in enumerate(zip(table.tolist(), kv_lengths.tolist(), strict=True)):
        if starts[i] == starts[i + 1]:
            continue
        used = slots[i, : -(-length // blocks.shape[-2])].to(blocks.device)
        chunks = per_row[row].index_select(1, used).to(device=query.device, dtype=query.dtype)
        keys, values = chunks.permute(2, 0, 1, 3, 4).flatten(2, 3)[:, :, :length].unbind(0)
        tokens = slice(starts[i], starts[i + 1])
        out[tokens] = _attend_causally(query[tokens].transpose(0, 1), keys, values, scale).transpose(0, 1)
    return out


def _attend_causally(query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """Attend with the last M of T tokens: query [H*G, M, D], keys and values [H, T, D] -> [H*G, M, D]."""
    query_heads, tokens, head_dim = query.shape
    kv_heads, length, _ = keys.shape
    group, prefix = query_heads // kv_heads, length - tokens
    grouped = query.reshape(kv_heads, group * tokens, head_dim)
    if tokens == 1:
        return _attend(grouped, keys, values, scale)[0].view_as(query)
    new_keys, new_values = (x[:, prefix:].repeat_interleave(group, dim=0) for x in (keys, values))
    out, lse = _attend(query, new_keys, new_values, scale, causal=True)
    if prefix:
        prefix_out, prefix_lse = _attend(grouped, keys[:, :prefix], values[:, :prefix], scale)
        weight = torch.sigmoid(prefix_lse.view_as(lse) - lse).unsqueeze(-1)
        out = torch.lerp(out.float(), prefix_out.view_as(out).float(), weight).to(query.dtype)
    return out


def _attend(query: Tensor, keys: Tensor, values: Tensor, scale: float, causal: bool = False) -> tuple[Tensor, Tensor]:
    """Attend: query [H, M, D], keys and values [H, T, D] -> out [H, M, D], float32 lse [H, M] (natural logarithm)."""
    if query.device.type == "cpu" and causal:
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query.unsqueeze(0), keys.unsqueeze(0), values.unsqueeze(0), 0.0, causal, scale=scale
        )
        return out.squeeze(0), lse.squeeze(0).float()
    scores = torch.matmul(query, keys.transpose(1, 2)).float().mul_(scale)
    if causal:
        scores.masked_fill_(torch.ones_like(scores[0], dtype=torch.bool).triu(1), float("-inf"))
    return torch.matmul(torch.softmax(scores, dim=-1).to(values.dtype), values), torch.logsumexp(scores, dim=-1)
