"""Loads admitted blocks from host memory, which the device reads by address, into resident slots."""

import triton
import triton.language as tl

from oasis_triton.chunks import copy_chunk


@triton.jit
def fetch_blocks(
    blocks,
    head_map,
    last_selected,
    slot_of,
    host_kv,
    req_to_token,
    rows,
    admitted_blocks,
    admitted_slots,
    number,
    offset,
    context,
    logical,
    H: tl.constexpr,
    K: tl.constexpr,
    P: tl.constexpr,
    B: tl.constexpr,
    D: tl.constexpr,
    TILE: tl.constexpr,
):
    """One program per (admission, KV head, entry): one chunk, and what the maps say of its slot."""
    CHUNK: tl.constexpr = 2 * B * D
    head, i = tl.program_id(1), tl.program_id(2)
    admission = (i * H + head) * tl.num_programs(0) + tl.program_id(0)
    block = tl.load(admitted_blocks + admission)
    if block < 0:
        return
    slot = tl.load(admitted_slots + admission)
    row = tl.load(rows + i)
    at = row * H + head
    page = (tl.load(req_to_token + row * context + block * B) // B).to(tl.int64)
    copy_chunk(host_kv + (page * H + head) * CHUNK, blocks + (at * P + slot) * CHUNK, CHUNK, TILE)
    old = tl.load(head_map + at * K + slot)
    tl.store(slot_of + at * logical + old, -1, mask=old >= 0)
    tl.store(slot_of + at * logical + block, slot)
    tl.store(head_map + at * K + slot, block)
    tl.store(last_selected + at * K + slot, 2 * tl.load(number) + offset)
