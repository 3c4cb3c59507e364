"""Block summaries: midpoint and half range of the keys, packed into records as `sglang_oasis/ops/summary.py` has them.

A vector is handled as two halves, coordinates d and d + D/2, because those share a byte of the 4-bit format.
"""

import triton
import triton.language as tl

from oasis_triton.conversions import to_bfloat16

TINY = tl.constexpr(1.1754943508222875e-38)
"""Smallest normal float32."""
ROUNDER = tl.constexpr(12582912.0)
"""1.5 * 2**23: adding and subtracting it rounds small float32 numbers to the nearest integer, half to even."""


@triton.jit
def bounds(keys, scaling, offset: tl.constexpr, D: tl.constexpr, B: tl.constexpr, HALF: tl.constexpr):
    """Midpoints and half ranges [HALF] of the coordinates from `offset` on, of a block's keys [B, D].

    Relative to the head's `scaling` [5, D], if there is one.
    """
    d = tl.arange(0, HALF)
    token = tl.arange(0, B)[:, None]
    found = tl.load(keys + token * D + offset + d[None, :], mask=(d < D // 2)[None, :], other=0.0).to(tl.float32)
    low, high = tl.min(found, 0), tl.max(found, 0)
    middle, around = (low + high) * 0.5, (high - low) * 0.5
    if scaling is not None:
        at = scaling + offset + d
        present = d < D // 2
        middle = (middle - tl.load(at, mask=present, other=0.0)) * tl.load(at + D, mask=present, other=0.0)
        around *= tl.load(at + 2 * D, mask=present, other=0.0)
    return middle, around


@triton.jit
def codes(vector, divisor, LEAST: tl.constexpr, LARGEST: tl.constexpr, BITS: tl.constexpr):
    """Nearest multiples of the scale, in the low BITS bits."""
    rounded = (tl.div_rn(vector, divisor) + ROUNDER) - ROUNDER
    return tl.minimum(tl.maximum(rounded, LEAST), LARGEST).to(tl.int32) & (2**BITS - 1)


@triton.jit
def store_vector(record, low, high, WHICH: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, BITS: tl.constexpr):
    """Write midpoints (WHICH 0) or half ranges (1) into a record; `high` has the coordinates from D/2 on."""
    d = tl.arange(0, HALF)
    present = d < D // 2
    if BITS == 16:
        place = record.to(tl.pointer_type(tl.bfloat16)) + WHICH * D + d
        tl.store(place, to_bfloat16(low), mask=present)
        tl.store(place + D // 2, to_bfloat16(high), mask=present)
    else:
        LARGEST: tl.constexpr = 2 ** (BITS - 1 + WHICH) - 1
        largest = tl.max(tl.maximum(tl.abs(low), tl.abs(high)), 0)
        scale = to_bfloat16(tl.div_rn(largest, LARGEST * 1.0))
        divisor = tl.maximum(scale.to(tl.float32), TINY)
        below = codes(low, divisor, -LARGEST * 1.0, LARGEST * 1.0, BITS)
        above = codes(high, divisor, -LARGEST * 1.0, LARGEST * 1.0, BITS)
        place = record + WHICH * (D * BITS // 8) + d
        if BITS == 4:
            tl.store(place, (below | (above << 4)).to(tl.uint8), mask=present)
        else:
            tl.store(place, below.to(tl.uint8), mask=present)
            tl.store(place + D // 2, above.to(tl.uint8), mask=present)
        tl.store((record + 2 * D * BITS // 8).to(tl.pointer_type(tl.bfloat16)) + WHICH, scale)


@triton.jit
def summarise(
    keys, scaling, record, row_record, in_row, D: tl.constexpr, B: tl.constexpr, HALF: tl.constexpr, BITS: tl.constexpr
):
    """Summarise a block's keys [B, D] into `record`, and into `row_record` where `in_row`."""
    low_middle, low_range = bounds(keys, scaling, 0, D, B, HALF)
    high_middle, high_range = bounds(keys, scaling, D // 2, D, B, HALF)
    store_vector(record, low_middle, high_middle, 0, D, HALF, BITS)
    store_vector(record, low_range, high_range, 1, D, HALF, BITS)
    if in_row:
        store_vector(row_record, low_middle, high_middle, 0, D, HALF, BITS)
        store_vector(row_record, low_range, high_range, 1, D, HALF, BITS)


@triton.jit
def summarise_blocks(
    kv,
    scaling,
    sources,
    records,
    targets,
    H: tl.constexpr,
    B: tl.constexpr,
    D: tl.constexpr,
    HALF: tl.constexpr,
    BITS: tl.constexpr,
    REC: tl.constexpr,
):
    """One program per (KV head, block)."""
    head, i = tl.program_id(0), tl.program_id(1)
    source = tl.load(sources + i)
    if source >= 0:
        record = records + (tl.load(targets + i) * H + head) * REC
        keys = kv + (source * H + head) * (2 * B * D)
        if scaling is None:
            summarise(keys, None, record, record, False, D, B, HALF, BITS)
        else:
            summarise(keys, scaling + head * 5 * D, record, record, False, D, B, HALF, BITS)
