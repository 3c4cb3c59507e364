"""Delta selection and capped eviction (OasisKV section 3.4, Algorithm 2), given the K best blocks."""

import triton
import triton.language as tl


@triton.jit
def select_admissions(
    predicted,
    candidates,
    rows,
    last_selected,
    slot_of,
    number,
    cap,
    admitted_blocks,
    admitted_slots,
    counters,
    offset,
    logical,
    H: tl.constexpr,
    K: tl.constexpr,
    C: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """One program per (KV head, entry); WIDTH is K rounded up to a power of two, C is at most K."""
    head, i = tl.program_id(0), tl.program_id(1)
    rank = tl.arange(0, WIDTH)
    at = i * H + head
    count = tl.load(candidates + i)
    if count == 0:
        tl.store(admitted_blocks + at * C + rank, tl.full((WIDTH,), -1, tl.int32), mask=rank < C)
        tl.store(admitted_slots + at * C + rank, tl.full((WIDTH,), -1, tl.int32), mask=rank < C)
        return

    resident = tl.load(rows + i) * H + head
    block = tl.load(predicted + at * K + rank, mask=rank < K, other=count).to(tl.int32)
    valid = block < count
    slot = tl.load(slot_of + resident * logical + block, mask=valid, other=0)
    missing = valid & (slot < 0)
    ages = last_selected + resident * K
    tl.store(ages + slot, 2 * tl.load(number) + offset, mask=valid & (slot >= 0))
    tl.debug_barrier()  # ages are read by other threads than those that marked them

    age = tl.load(ages + rank, mask=rank < K, other=2147483647).to(tl.int64)
    oldest = (tl.sort(age * WIDTH + rank) % WIDTH).to(tl.int32)
    wanted = tl.sum(missing.to(tl.int32), 0)
    admitted = tl.minimum(tl.minimum(tl.load(cap), C), wanted)
    tl.store(admitted_slots + at * C + rank, tl.where(rank < admitted, oldest, -1), mask=rank < C)
    tl.store(admitted_blocks + at * C + rank, tl.full((WIDTH,), -1, tl.int32), mask=(rank >= admitted) & (rank < C))
    place = tl.cumsum(missing.to(tl.int32), 0) - 1
    tl.store(admitted_blocks + at * C + place, block, mask=missing & (place < admitted))
    tl.atomic_add(counters, admitted.to(tl.int64))
    tl.atomic_add(counters + 1, (wanted - admitted).to(tl.int64))
