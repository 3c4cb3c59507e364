"""L2, the pool of record: every token of every request in host memory, indexed by SGLang's KV indices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from sglang_oasis.ops.summary import SummaryFormat, summarise_pages
from sglang_oasis.ops.tokens import store_tokens

Allocate = Callable[[tuple[int, ...], torch.dtype], Tensor]
"""A function that makes a zeroed CPU tensor of a shape and dtype."""


def pageable(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return a zeroed tensor in ordinary memory, which the system provides when it is first written."""
    return torch.zeros(shape, dtype=dtype)


class HostPool:
    """The pages of K and V and the summaries of completed pages, per layer.

    Args:
        num_pages, num_layers, kv_heads, block_size, head_dim, dtype: shape and element type of the pages.
        summary_format: how completed pages are summarised, None for no summaries.
        scalings: per layer [H, 5, D], what its summaries are relative to, see `KeyStatistics.packed`; None for nothing.
        allocate: allocates the memory; a CUDA device needs pinned memory (`tier/host_memory/pinned.py`).

    Attributes:
        kv: per layer [N_pages, H, 2, B, D]; K and V of one (page, head) are one contiguous chunk.
        summaries: per layer [N_pages, H, R] uint8, valid for completed pages only; empty without `summary_format`.
        formats: per layer, how its pages are summarised; empty without `summary_format`.
    """

    def __init__(
        self,
        *,
        num_pages: int,
        num_layers: int,
        kv_heads: int,
        block_size: int,
        head_dim: int,
        dtype: torch.dtype,
        summary_format: SummaryFormat | None,
        scalings: Sequence[Tensor | None] | None = None,
        allocate: Allocate = pageable,
    ) -> None:
        self.num_pages = num_pages
        self.block_size = block_size
        formats = [summary_format] * num_layers if summary_format else []
        fitted = scalings or [None] * len(formats)
        self.formats = [replace(fmt, scaling=scaling) for fmt, scaling in zip(formats, fitted, strict=True)]
        self.kv = [allocate((num_pages, kv_heads, 2, block_size, head_dim), dtype) for _ in range(num_layers)]
        self.summaries = [
            allocate((num_pages, kv_heads, fmt.record_bytes(head_dim)), torch.uint8) for fmt in self.formats
        ]

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self.kv) + sum(t.nbytes for t in self.summaries)

    def write(self, layer: int, indices: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store K and V of tokens.

        Args:
            layer: layer of this rank.
            indices: [T], KV indices.
            keys, values: [T, H, D] on any device.
        """
        store_tokens(self.kv[layer], None, indices.to("cpu", torch.int64), keys, values)

    def read(self, layer: int, indices: Tensor) -> Tensor:
        """Return K and V of tokens: indices [T] -> [T, H, 2, D]."""
        page, offset = self.locate(indices)
        return self.kv[layer][page, :, :, offset]

    def summarise(self, layer: int, pages: Tensor) -> None:
        """Build the summaries of completed pages [P] int64."""
        if pages.numel() and self.formats:
            summarise_pages(self.kv[layer], pages, self.formats[layer], self.summaries[layer])

    def move(self, target: Tensor, source: Tensor) -> None:
        """Copy tokens from KV indices `source` [T] to `target` [T] in all layers."""
        for layer in range(len(self.kv)):
            tokens = self.read(layer, source)
            self.write(layer, target, tokens[:, :, 0], tokens[:, :, 1])

    def locate(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Convert KV indices [T] to (page, offset in the page), int64 on the host."""
        indices = indices.to("cpu", torch.int64)
        return indices // self.block_size, indices % self.block_size
