"""The Triton implementations of the staging ops; importing this module registers them for CUDA tensors.

Host tensors must be pinned, as `kernels/triton/overrides.py` explains. `launches.py` explains what a launch is.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sglang_oasis.kernels.triton.launches import Launch, power_of_two
from sglang_oasis.ops import staging as faces
from sglang_oasis.ops.staging import PageCopies, TokenRuns
from sglang_oasis.ops.tokens import store_tokens

from oasis_triton import staging as kernels  # isort: skip  (launches makes it importable)

LINK_PROGRAMS = 64
"""Programs that copy over the host link: with a chunk of 8 KiB each, four times what PCIe 5 has in flight in 2 us."""
COPY_TILE = 1024
"""64-bit words that a program copies in one operation."""
FORGET_TILE = 256
"""Tokens that a program looks up."""


def stage_pages_launch(staging: Tensor, arena: Tensor, host_kv: Tensor, copies: PageCopies) -> Launch:
    heads, words, tile = _chunk(staging)
    arguments = {
        "staging": _words(staging),
        "arena": _words(arena),
        "host_kv": _words(host_kv),
        **copies._asdict(),
        "count": len(copies.pages),
        "H": heads,
        "WORDS": words,
        "TILE": tile,
    }
    return Launch(kernels.stage_pages, (min(LINK_PROGRAMS, len(copies.pages) * heads),), arguments)


def write_back_launch(staging: Tensor, host_kv: Tensor, runs: TokenRuns) -> Launch:
    heads, words, tile = _chunk(staging)
    block_size = staging.shape[-2]
    arguments = {
        "staging": _words(staging),
        "host_kv": _words(host_kv),
        "places": runs.places,
        "pages": runs.pages,
        "firsts": runs.first,
        "lasts": runs.last,
        "count": len(runs.pages),
        "H": heads,
        "B": block_size,
        "WORDS": words,
        "TOKEN_WORDS": words // (2 * block_size),
        "TILE": tile,
    }
    return Launch(kernels.write_back, (min(LINK_PROGRAMS, len(runs.pages) * heads),), arguments)


def store_tokens_launch(pages: Tensor, positions: Tensor, keys: Tensor, values: Tensor) -> Launch:
    if keys.stride(-1) != 1 or values.stride(-1) != 1:
        raise ValueError(
            f"The last dimensions of keys and values must be contiguous, got strides {keys.stride(-1)} and "
            f"{values.stride(-1)}."
        )
    _, heads, _, block_size, head_dim = pages.shape
    arguments: dict[str, Any] = {
        "blocks": pages,
        "positions": positions,
        "keys": keys,
        "values": values,
        "key_stride": keys.stride(0),
        "key_head_stride": keys.stride(1),
        "value_stride": values.stride(0),
        "value_head_stride": values.stride(1),
        "H": heads,
        "B": block_size,
        "D": head_dim,
        "HEADS": power_of_two(heads),
        "WIDTH": power_of_two(head_dim),
    }
    return Launch(kernels.store_tokens, (len(positions),), arguments)


def forget_pages_launch(tags: Tensor, indices: Tensor, block_size: int) -> Launch:
    arguments = {
        "tags": tags,
        "indices": indices,
        "count": len(indices),
        "num_places": len(tags),
        "B": block_size,
        "TILE": FORGET_TILE,
    }
    return Launch(kernels.forget_pages, (-(-len(indices) // FORGET_TILE),), arguments)


@faces.stage_pages.register("cuda")
def stage_pages(staging: Tensor, arena: Tensor, host_kv: Tensor, copies: PageCopies) -> None:
    if len(copies.pages):
        stage_pages_launch(staging, arena, host_kv, copies).run()


@faces.write_back.register("cuda")
def write_back(staging: Tensor, host_kv: Tensor, runs: TokenRuns) -> None:
    if len(runs.pages):
        write_back_launch(staging, host_kv, runs).run()


@store_tokens.register("cuda")
def store_into_pages(blocks: Tensor, rows: Tensor | None, positions: Tensor, keys: Tensor, values: Tensor) -> None:
    if rows is not None:
        return NotImplemented
    if len(positions):
        store_tokens_launch(blocks, positions, keys, values).run()
    return None


@faces.forget_pages.register("cuda")
def forget_pages(tags: Tensor, indices: Tensor, block_size: int) -> None:
    if len(tags) and len(indices):
        forget_pages_launch(tags, indices, block_size).run()


def _words(pages: Tensor) -> Tensor:
    """Return pages as 64-bit words: copying does not depend on the element type."""
    if not pages.is_contiguous():
        raise ValueError(f"Pages must be contiguous, got strides {pages.stride()}.")
    return pages.view(torch.int64)


def _chunk(pages: Tensor) -> tuple[int, int, int]:
    """Return (KV heads, words of K and V of one (page, head), words that a program copies in one operation)."""
    heads = pages.shape[1]
    words = pages[0, 0].nbytes // torch.int64.itemsize
    return heads, words, min(COPY_TILE, power_of_two(words))
