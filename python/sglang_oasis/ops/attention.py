"""Attention over the resident tier (decode) and over the host pool (extend)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sglang_oasis.ops.dispatch import device_op


def _softmax_attention(query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """query [H, M, D], keys and values [H, T, D] -> [H, M, D]; scores and softmax in float32."""
    scores = torch.matmul(query, keys.transpose(1, 2)).float().mul_(scale)
    return torch.matmul(torch.softmax(scores, dim=-1).to(values.dtype), values)


@device_op
def resident_decode_attention(
    query: Tensor, blocks: Tensor, rows: Tensor, slots: Sequence[Tensor], kv_lengths: Sequence[int], scale: float
) -> Tensor:
    """One decode token per row attends to its resident slots; every KV head of a row uses the same slot list.

    Args:
        query: [n, H*G, D], the group of KV head h is heads h*G .. h*G+G-1.
        blocks: [S, H, K+R, 2, B, D], one layer of the resident tier.
        rows: [n] int64, rows of `blocks`.
        slots: per row [slots_i] int64; the partly filled slot is last.
        kv_lengths: per row, tokens to attend to: (slots_i - 1) * B + fill of the last slot.
        scale: softmax scale.

    Returns:
        [n, H*G, D], dtype of `query`.
    """
    _, query_heads, head_dim = query.shape
    kv_heads = blocks.shape[1]
    out = torch.empty_like(query)
    for i, row in enumerate(rows.tolist()):
        row_slots = slots[i].to(blocks.device)
        keys = blocks[row, :, :, 0].index_select(1, row_slots).view(kv_heads, -1, head_dim)[:, : kv_lengths[i]]
        values = blocks[row, :, :, 1].index_select(1, row_slots).view(kv_heads, -1, head_dim)[:, : kv_lengths[i]]
        grouped = query[i].view(kv_heads, query_heads // kv_heads, head_dim).to(keys.dtype)
        out[i] = _softmax_attention(grouped, keys, values, scale).reshape(query_heads, head_dim)
    return out


def _merge(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> Tensor:
    """Combine two softmax partitions: out [H, M, D], lse [H, M] (natural log of the sum of exponentials)."""
    weight = torch.sigmoid(lse_b - lse_a).unsqueeze(-1)
    return torch.lerp(out_a.float(), out_b.float(), weight)


def _attend_with_lse(query: Tensor, keys: Tensor, values: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    """query [H, M, D], keys and values [H, T, D] -> out [H, M, D], float32 lse [H, M]."""
    if query.device.type == "cpu":
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query.unsqueeze(0), keys.unsqueeze(0), values.unsqueeze(0), 0.0, causal, scale=scale
        )
        return out.squeeze(0), lse.squeeze(0).float()
    scores = torch.matmul(query, keys.transpose(1, 2)).float() * scale
    if causal:
        scores.masked_fill_(torch.ones_like(scores[0], dtype=torch.bool).triu(1), float("-inf"))
    return torch.matmul(torch.softmax(scores, -1).to(values.dtype), values), torch.logsumexp(scores, -1)


@device_op
def dense_extend_attention(
    query: Tensor, new_keys: Tensor, new_values: Tensor, prefix_blocks: Tensor, prefix_length: int, scale: float
) -> Tensor:
    """New tokens of one request attend to their whole prefix and, causally, to themselves; exact.

    The new tokens are never padded to the prefix, and the prefix is read once for all heads of a group.

    Args:
        query: [T, H*G, D].
        new_keys, new_values: [T, H, D], the T new tokens.
        prefix_blocks: [P, H, 2, B, D], the prefix's host pages in logical order (P = 0 without a prefix).
        prefix_length: tokens of the prefix, at most P*B; the tail of the last page belongs to the new tokens.
        scale: softmax scale.

    Returns:
        [T, H*G, D], dtype of `query`.
    """
    tokens, query_heads, head_dim = query.shape
    kv_heads = new_keys.shape[1]
    group = query_heads // kv_heads
    per_head = query.transpose(0, 1)
    out, lse = _attend_with_lse(
        per_head,
        new_keys.transpose(0, 1).repeat_interleave(group, dim=0).to(query.dtype),
        new_values.transpose(0, 1).repeat_interleave(group, dim=0).to(query.dtype),
        scale,
        causal=True,
    )
    if prefix_length:
        prefix = prefix_blocks.to(device=query.device, dtype=query.dtype).permute(2, 1, 0, 3, 4)
        keys, values = prefix.reshape(2, kv_heads, -1, head_dim)[:, :, :prefix_length].unbind(0)
        grouped = per_head.reshape(kv_heads, group * tokens, head_dim)
        prefix_out, prefix_lse = _attend_with_lse(grouped, keys, values, scale, causal=False)
        prefix_out = prefix_out.reshape(query_heads, tokens, head_dim)
        out = _merge(out, lse, prefix_out, prefix_lse.reshape(query_heads, tokens)).to(query.dtype)
    return out.transpose(0, 1)
