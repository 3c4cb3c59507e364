"""Copies of whole pages and of runs of tokens between host pages, a staging buffer and a cache, in 64-bit words.

The two copies over the link are grid-stride loops: a few dozen programs keep a host link full, and leave the
multiprocessors to the attention that runs beside them. WORDS are the words of K and V of one (page, head).
"""

import triton
import triton.language as tl

from oasis_triton.conversions import convert


@triton.jit
def stage_pages(
    staging,
    arena,
    host_kv,
    pages,
    targets,
    hits,
    fills,
    count,
    H: tl.constexpr,
    WORDS: tl.constexpr,
    TILE: tl.constexpr,
):
    for chunk in range(tl.program_id(0), count * H, tl.num_programs(0)):
        entry, head = chunk // H, chunk % H
        page = tl.load(pages + entry).to(tl.int64)
        if page >= 0:
            target = tl.load(targets + entry).to(tl.int64)
            hit = tl.load(hits + entry).to(tl.int64)
            fill = tl.load(fills + entry).to(tl.int64)
            for start in tl.static_range(0, WORDS, TILE):
                word = start + tl.arange(0, TILE)
                inside = word < WORDS
                if hit >= 0:
                    words = tl.load(arena + (hit * H + head) * WORDS + word, mask=inside)
                else:
                    words = tl.load(host_kv + (page * H + head) * WORDS + word, mask=inside)
                tl.store(staging + (target * H + head) * WORDS + word, words, mask=inside)
                if (hit < 0) & (fill >= 0):
                    tl.store(arena + (fill * H + head) * WORDS + word, words, mask=inside)


@triton.jit
def write_back(
    staging,
    host_kv,
    places,
    pages,
    firsts,
    lasts,
    count,
    H: tl.constexpr,
    B: tl.constexpr,
    WORDS: tl.constexpr,
    TOKEN_WORDS: tl.constexpr,
    TILE: tl.constexpr,
):
    for chunk in range(tl.program_id(0), count * H, tl.num_programs(0)):
        entry, head = chunk // H, chunk % H
        place, page = tl.load(places + entry).to(tl.int64), tl.load(pages + entry).to(tl.int64)
        first, last = tl.load(firsts + entry), tl.load(lasts + entry)
        for start in tl.static_range(0, WORDS, TILE):
            word = start + tl.arange(0, TILE)
            offset = word // TOKEN_WORDS % B
            written = (word < WORDS) & (offset >= first) & (offset < last)
            words = tl.load(staging + (place * H + head) * WORDS + word, mask=written)
            tl.store(host_kv + (page * H + head) * WORDS + word, words, mask=written)


@triton.jit
def store_tokens(
    blocks,
    positions,
    keys,
    values,
    key_stride,
    key_head_stride,
    value_stride,
    value_head_stride,
    H: tl.constexpr,
    B: tl.constexpr,
    D: tl.constexpr,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """One program per token: K and V of all heads, converted to the type of the pages."""
    token = tl.program_id(0).to(tl.int64)
    position = tl.load(positions + token)
    head, d = tl.arange(0, HEADS)[:, None], tl.arange(0, WIDTH)[None, :]
    inside = (head < H) & (d < D)
    target = blocks + ((position // B * H + head) * 2 * B + position % B) * D + d
    key = tl.load(keys + token * key_stride + head * key_head_stride + d, mask=inside)
    tl.store(target, convert(key, blocks.dtype.element_ty), mask=inside)
    value = tl.load(values + token * value_stride + head * value_head_stride + d, mask=inside)
    tl.store(target + B * D, convert(value, blocks.dtype.element_ty), mask=inside)


@triton.jit
def forget_pages(tags, indices, count, num_places, B: tl.constexpr, TILE: tl.constexpr):
    at = tl.program_id(0) * TILE + tl.arange(0, TILE)
    index = tl.load(indices + at, mask=at < count, other=-1)
    page = tl.where(index >= 0, index // B, 0)
    place = page % num_places
    cached = tl.load(tags + place) == page
    tl.store(tags + place, -1, mask=cached & (index >= 0))
