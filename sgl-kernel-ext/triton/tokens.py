"""Takes new tokens into both tiers: graduation, write-through, summaries of the blocks that they complete."""

import triton
import triton.language as tl

from oasis_triton.chunks import copy_chunk
from oasis_triton.conversions import convert
from oasis_triton.summaries import summarise


@triton.jit
def take_tokens(
    blocks,
    head_map,
    last_selected,
    slot_of,
    summaries,
    host_kv,
    host_summaries,
    scaling,
    req_to_token,
    rows,
    lengths,
    graduates,
    completed,
    expected,
    number,
    indices,
    keys,
    values,
    first,
    context,
    logical,
    key_stride,
    key_head_stride,
    value_stride,
    value_head_stride,
    H: tl.constexpr,
    K: tl.constexpr,
    R: tl.constexpr,
    B: tl.constexpr,
    D: tl.constexpr,
    M: tl.constexpr,
    BITS: tl.constexpr,
    REC: tl.constexpr,
    TOKENS: tl.constexpr,
    WIDTH: tl.constexpr,
    HALF: tl.constexpr,
    TILE: tl.constexpr,
):
    """One program per (KV head, entry). TOKENS, WIDTH and HALF are M, D and D/2 rounded up to a power of two."""
    CHUNK: tl.constexpr = 2 * B * D
    head, i = tl.program_id(0), tl.program_id(1)
    row = tl.load(rows + i)
    at = row * H + head
    resident = blocks + at * (K + R) * CHUNK

    graduate = tl.load(graduates + i)
    if (graduate >= 0) & (graduate < K):
        copy_chunk(resident + (K + graduate % R) * CHUNK, resident + graduate * CHUNK, CHUNK, TILE)
        tl.store(head_map + at * K + graduate, graduate)
        tl.store(slot_of + at * logical + graduate, graduate)
        tl.store(last_selected + at * K + graduate, 2 * tl.load(number) - 1)
    tl.debug_barrier()  # the new block may begin in the local slot that was just read

    token, d = tl.arange(0, TOKENS), tl.arange(0, WIDTH)
    present = (token < M)[:, None] & (d < D)[None, :]
    position = tl.load(lengths + i) - 1 + first + token
    local = resident + (K + position // B % R) * CHUNK + position % B * D
    index = tl.load(indices + i * M + token, mask=token < M, other=0)
    host = host_kv + (index // B * H + head) * CHUNK + index % B * D
    t = (i * M + token).to(tl.int64)
    key = tl.load(keys + (t * key_stride + head * key_head_stride)[:, None] + d[None, :], mask=present)
    value = tl.load(values + (t * value_stride + head * value_head_stride)[:, None] + d[None, :], mask=present)
    tl.store(host[:, None] + d[None, :], convert(key, host_kv.dtype.element_ty), mask=present)
    tl.store(host[:, None] + B * D + d[None, :], convert(value, host_kv.dtype.element_ty), mask=present)
    tl.store(local[:, None] + d[None, :], convert(key, blocks.dtype.element_ty), mask=present)
    tl.store(local[:, None] + B * D + d[None, :], convert(value, blocks.dtype.element_ty), mask=present)
    tl.debug_barrier()  # summaries read what other threads have just stored

    for which in tl.static_range(2):
        if which == 0:
            block = tl.load(completed + i)
        else:
            block = tl.load(expected + i)
        if block >= 0:
            page = (tl.load(req_to_token + row * context + block * B) // B).to(tl.int64)
            summarise(
                resident + (K + block % R) * CHUNK,
                None if scaling is None else scaling + head * 5 * D,
                host_summaries + (page * H + head) * REC,
                summaries + (at * logical + block) * REC,
                which == 0,
                D,
                B,
                HALF,
                BITS,
            )
