"""Exact causal attention over paged K and V: what serves where FlashInfer is absent or does not know the head size."""

import triton
import triton.language as tl

from oasis_triton.conversions import convert


@triton.jit
def attend(
    query,
    blocks,
    rows,
    slots,
    kv_lengths,
    query_starts,
    out,
    scale,
    query_stride,
    query_head_stride,
    slots_stride,
    row_stride,
    head_stride,
    slot_stride,
    H: tl.constexpr,
    G: tl.constexpr,
    B: tl.constexpr,
    D: tl.constexpr,
    COMPUTE: tl.constexpr,
    VECTORS: tl.constexpr,
    TILE: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """One program per (tile of query vectors, KV head, sequence).

    The query vectors of a (sequence, head) are its query tokens times the G heads of the group, so a slot is read once
    for all of them, if one tile has room. Strides of `blocks` are in elements; `rows` is None for pages. WIDTH is D
    rounded up to a power of two.
    """
    head, i = tl.program_id(1), tl.program_id(2)
    begin = tl.load(query_starts + i)
    tokens = tl.load(query_starts + i + 1) - begin
    first = tl.program_id(0) * VECTORS
    if first >= tokens * G:
        return
    length = tl.load(kv_lengths + i)
    chunks = blocks + head.to(tl.int64) * head_stride
    if rows is not None:
        chunks += tl.load(rows + i) * row_stride

    v, d = first + tl.arange(0, VECTORS), tl.arange(0, WIDTH)
    asked = (v < tokens * G)[:, None] & (d < D)[None, :]
    token, of_group = (begin + v // G).to(tl.int64), head * G + v % G
    vectors = query + token * query_stride + of_group * query_head_stride
    q = tl.load(vectors[:, None] + d[None, :], mask=asked, other=0.0).to(COMPUTE)
    sees = length - tokens + v // G  # the last position that each vector attends to
    last = tl.minimum(length, length - tokens + (first + VECTORS - 1) // G + 1)

    largest = tl.full((VECTORS,), float("-inf"), tl.float32)
    total = tl.zeros((VECTORS,), tl.float32)
    sums = tl.zeros((VECTORS, WIDTH), tl.float32)
    for start in range(0, last, TILE):
        t = start + tl.arange(0, TILE)
        slot = tl.load(slots + i.to(tl.int64) * slots_stride + t // B, mask=t < last, other=0).to(tl.int64)
        chunk = chunks + slot * slot_stride + t % B * D
        present = (t < last)[:, None] & (d < D)[None, :]
        keys = tl.load(chunk[:, None] + d[None, :], mask=present, other=0.0).to(COMPUTE)
        logits = tl.dot(q, tl.trans(keys), input_precision="ieee") * scale
        logits = tl.where((t[None, :] <= sees[:, None]) & (t < last)[None, :], logits, float("-inf"))
        now = tl.maximum(largest, tl.max(logits, 1))
        weights = tl.exp(logits - now[:, None])
        fade = tl.exp(largest - now)
        total = total * fade + tl.sum(weights, 1)
        values = tl.load(chunk[:, None] + B * D + d[None, :], mask=present, other=0.0).to(COMPUTE)
        sums = tl.dot(weights.to(COMPUTE), values, sums * fade[:, None], input_precision="ieee")
        largest = now

    place = out + (token * (H * G) + of_group)[:, None] * D + d[None, :]
    tl.store(place, convert(sums / total[:, None], out.dtype.element_ty), mask=asked)
