"""Copies K and V of one (block, head), in 16-byte vectors where the element types allow it."""

import triton
import triton.language as tl

from oasis_triton.conversions import convert


@triton.jit
def copy_chunk(source, target, CHUNK: tl.constexpr, TILE: tl.constexpr):
    """CHUNK elements from `source` to `target`, converted to its type; both are aligned to 16 bytes."""
    for start in tl.static_range(0, CHUNK, TILE):
        place = start + tl.arange(0, TILE)
        elements = tl.load(source + place, mask=place < CHUNK, eviction_policy="evict_first")
        tl.store(target + place, convert(elements, target.dtype.element_ty), mask=place < CHUNK)
