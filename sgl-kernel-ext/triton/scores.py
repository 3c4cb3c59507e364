"""Block scores over summaries, in two kernels: estimates with their softmax sums per tile, then the ranking.

Records are read once. Between the kernels lie one float32 per block and query vector, and two per tile of blocks and
query vector. A query vector is one query head of one of the Q queries of an entry.
"""

import triton
import triton.language as tl


@triton.jit
def load_vectors(record, present, WHICH: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, BITS: tl.constexpr):
    """Midpoints (WHICH 0) or half ranges (1) of each record: codes, or values of 16 bits, two times [TILE, HALF].

    The first have the coordinates below D/2, the second those from D/2 on.
    """
    d = tl.arange(0, HALF)
    mask = present[:, None] & (d < D // 2)[None, :]
    if BITS == 16:
        place = record.to(tl.pointer_type(tl.bfloat16))[:, None] + WHICH * D + d[None, :]
        return tl.load(place, mask=mask, other=0.0), tl.load(place + D // 2, mask=mask, other=0.0)
    else:
        SIGN: tl.constexpr = 2 ** (BITS - 1) if WHICH == 0 else 0
        place = record[:, None] + WHICH * (D * BITS // 8) + d[None, :]
        if BITS == 4:
            byte = tl.load(place, mask=mask, other=0).to(tl.int32)
            below, above = byte & 15, byte >> 4
        else:
            below = tl.load(place, mask=mask, other=0).to(tl.int32)
            above = tl.load(place + D // 2, mask=mask, other=0).to(tl.int32)
        return (below ^ SIGN) - SIGN, (above ^ SIGN) - SIGN


@triton.jit
def project(
    record,
    present,
    low,
    high,
    WHICH: tl.constexpr,
    D: tl.constexpr,
    HALF: tl.constexpr,
    BITS: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    """Midpoints (WHICH 0) or half ranges (1) of each record times the query vectors: [TILE, VECTORS] float32."""
    below, above = load_vectors(record, present, WHICH, D, HALF, BITS)
    dot = tl.dot(below.to(COMPUTE), low, input_precision="ieee")
    dot = tl.dot(above.to(COMPUTE), high, dot, input_precision="ieee")
    if BITS < 16:
        scales = (record + 2 * D * BITS // 8).to(tl.pointer_type(tl.bfloat16))
        dot *= tl.load(scales + WHICH, mask=present, other=0.0).to(tl.float32)[:, None]
    return dot


@triton.jit
def estimate(
    queries,
    summaries,
    scaling,
    rows,
    candidates,
    estimates,
    partials,
    scale,
    tightness,
    logical,
    entry_stride,
    query_stride,
    head_stride,
    H: tl.constexpr,
    G: tl.constexpr,
    Q: tl.constexpr,
    D: tl.constexpr,
    BITS: tl.constexpr,
    REC: tl.constexpr,
    COMPUTE: tl.constexpr,
    TILE: tl.constexpr,
    VECTORS: tl.constexpr,
    HALF: tl.constexpr,
):
    """One program per (tile of blocks, KV head, entry).

    Writes estimates [n, H, Q*G, N], of candidates only, and partials [n, H, tiles, 2, Q*G]: the largest estimate
    and the sum of the exponentials relative to it. VECTORS is at least Q*G.
    """
    tile, head, i = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    count = tl.load(candidates + i)
    if tile * TILE >= count:
        return
    v, d = tl.arange(0, VECTORS), tl.arange(0, HALF)
    wanted = (v < Q * G)[None, :] & (d < D // 2)[:, None]
    vector = queries + i.to(tl.int64) * entry_stride + v // G * query_stride + (head * G + v % G) * head_stride
    low = tl.load(vector[None, :] + d[:, None], mask=wanted, other=0.0).to(COMPUTE)
    high = tl.load(vector[None, :] + D // 2 + d[:, None], mask=wanted, other=0.0).to(COMPUTE)

    block = tile * TILE + tl.arange(0, TILE)
    present = block < count
    record = summaries + ((tl.load(rows + i) * H + head) * logical + block) * REC
    low_range, high_range = tl.abs(low), tl.abs(high)
    if scaling is not None:
        at, there = scaling + head * 5 * D + d[:, None], (d < D // 2)[:, None]
        low = (low * tl.load(at + 3 * D, mask=there, other=0.0)).to(COMPUTE)
        high = (high * tl.load(at + 3 * D + D // 2, mask=there, other=0.0)).to(COMPUTE)
        low_range = (low_range * tl.load(at + 4 * D, mask=there, other=0.0)).to(COMPUTE)
        high_range = (high_range * tl.load(at + 4 * D + D // 2, mask=there, other=0.0)).to(COMPUTE)
    middle = project(record, present, low, high, 0, D, HALF, BITS, COMPUTE)
    around = project(record, present, low_range, high_range, 1, D, HALF, BITS, COMPUTE)
    found = (middle + tightness * around) * scale

    at = i.to(tl.int64) * H + head
    place = estimates + (at * (Q * G) + v[None, :]) * logical + block[:, None]
    tl.store(place, found, mask=present[:, None] & (v < Q * G)[None, :])
    found = tl.where(present[:, None], found, float("-inf"))
    largest = tl.max(found, 0)
    partial = partials + (at * tl.num_programs(0) + tile) * (2 * Q * G) + v
    tl.store(partial, largest, mask=v < Q * G)
    tl.store(partial + Q * G, tl.sum(tl.exp(found - largest[None, :]), 0), mask=v < Q * G)


@triton.jit
def rank(
    estimates,
    partials,
    rows,
    candidates,
    averages,
    scores,
    decay,
    escape,
    sinks,
    logical,
    tiles,
    H: tl.constexpr,
    COUNT: tl.constexpr,
    ESTIMATE_TILE: tl.constexpr,
    TILE: tl.constexpr,
    VECTORS: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """One program per (tile of blocks, KV head, entry): mean of COUNT = Q*G softmaxes, smoothed where `averages`."""
    head, i = tl.program_id(1), tl.program_id(2)
    block = tl.program_id(0) * TILE + tl.arange(0, TILE)
    count = tl.load(candidates + i)
    at = i.to(tl.int64) * H + head
    place = scores + at * logical + block
    if tl.program_id(0) * TILE >= count:
        tl.store(place, tl.full((TILE,), float("-inf"), tl.float32), mask=block < logical)
        return

    v = tl.arange(0, VECTORS)
    largest = tl.full((VECTORS,), float("-inf"), tl.float32)
    total = tl.zeros((VECTORS,), tl.float32)
    for start in range(0, tl.cdiv(count, ESTIMATE_TILE), AT_ONCE):
        tile = start + tl.arange(0, AT_ONCE)
        partial = partials + ((at * tiles + tile) * (2 * COUNT))[:, None] + v[None, :]
        mask = ((tile * ESTIMATE_TILE < count) & (tile < tiles))[:, None] & (v < COUNT)[None, :]
        tops = tl.load(partial, mask=mask, other=float("-inf"))
        sums = tl.load(partial + COUNT, mask=mask, other=0.0)
        now = tl.where(v < COUNT, tl.maximum(largest, tl.max(tops, 0)), 0.0)
        total = total * tl.exp(largest - now) + tl.sum(sums * tl.exp(tops - now[None, :]), 0)
        largest = now

    present = block < count
    mask = present[:, None] & (v < COUNT)[None, :]
    found = tl.load(estimates + (at * COUNT + v[None, :]) * logical + block[:, None], mask=mask, other=float("-inf"))
    weights = tl.exp(found - largest[None, :]) / tl.where(v < COUNT, total, 1.0)[None, :]
    score = tl.sum(weights, 1) / COUNT
    if averages is not None:
        average = averages + (tl.load(rows + i) * H + head) * logical + block
        old = tl.load(average, mask=present, other=0.0)
        blended = tl.where(old < 0, score, decay * old + (1 - decay) * score)
        score = tl.maximum(blended, score / escape)
        tl.store(average, score, mask=present)
    score = tl.where(block < sinks, float("inf"), score)
    tl.store(place, tl.where(present, score, float("-inf")), mask=block < logical)
