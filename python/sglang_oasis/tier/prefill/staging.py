"""Prefill on a device whose KV cache is in host memory: pages are copied to a staging buffer layer by layer.

Two buffers alternate. A turn is one layer of a group of requests. While attention of one turn runs on its buffer, the
prefix pages of the next turn are copied into the other buffer, and the new tokens of this turn to the host. So device
memory does not grow with the number of layers, and the forward pass waits for the link only if a turn is shorter than
its transfers.

    fetch        | pages t+1           | pages t+2           |
    forward pass | tokens t, attend t  | tokens t+1, attend  |
    write back   |    tokens t -> host |    tokens t+1       |

The order of the operations:
- a buffer is filled after the forward pass has read, and the write-back has copied, its contents of two turns ago;
- the forward pass stores new tokens and attends after the turn's pages have arrived;
- write-back begins after the turn's tokens are stored;
- a pass begins after the last pass's write-backs, because their pages are now prefixes or belong to other requests.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from sglang_oasis.ops.staging import stage_pages, write_back
from sglang_oasis.ops.streams import Event, Streams
from sglang_oasis.ops.tokens import store_tokens
from sglang_oasis.tier.layout import TierLayout
from sglang_oasis.tier.prefill.page_cache import PageCache
from sglang_oasis.tier.prefill.plan import PrefillPass, StagedGroup, plan_pass

FETCH, WRITE_BACK = "prefill_fetch", "prefill_write_back"
"""Two side streams, because the link works in both directions at once."""


class Staged(NamedTuple):
    """A group of requests whose tokens of one layer, prefix and new ones, are in a staging buffer.

    Attributes:
        group: the requests, and the tables of the buffer.
        kv: [X, H, 2, B, D], the buffer; places that are in no table have arbitrary contents.
    """

    group: StagedGroup
    kv: Tensor


class _Buffer:
    """One of the two buffers, and the events of its last turn."""

    def __init__(self, kv: Tensor) -> None:
        self.kv = kv
        self.fetched: Event = None
        self.read: Event = None
        self.written: Event = None


class PrefillStaging:
    """Owns the staging buffers and the page cache, and orders all operations on them.

    Args:
        layout: sizes of the tiers.
        host_kv: per layer, [N_pages, H, 2, B, D]; in pinned memory if the device is a GPU.
        max_pages: X, pages of a buffer; at least those of the longest request.
        cache_places: pages that the cache may hold.
        device: device of the buffers.
        streams: streams of that device.

    Raises:
        ValueError: a buffer is too small for the longest request.
    """

    def __init__(
        self,
        layout: TierLayout,
        host_kv: Sequence[Tensor],
        *,
        max_pages: int,
        cache_places: int,
        device: torch.device,
        streams: Streams,
    ) -> None:
        if max_pages < layout.max_blocks:
            raise ValueError(
                f"A staging buffer of {max_pages} pages is too small for a request of {layout.max_blocks}: raise it."
            )
        self.cache = PageCache(layout, min(cache_places, len(host_kv[0])), device)
        self._host_kv = host_kv
        self._max_pages = max_pages
        self._streams = streams
        shape = max_pages, layout.kv_heads, 2, layout.block_size, layout.head_dim
        self._buffers = [_Buffer(torch.empty(shape, dtype=layout.dtype, device=device)) for _ in range(2)]
        self._groups: list[StagedGroup] = []
        self._turn = self._turns = 0
        self._last_written: Event | None = None

    @staticmethod
    def bytes_of(layout: TierLayout, max_pages: int) -> int:
        """Return the bytes of both buffers with `max_pages` pages each."""
        return 2 * max_pages * layout.kv_heads * layout.chunk_bytes

    @property
    def nbytes(self) -> int:
        return sum(buffer.kv.nbytes for buffer in self._buffers) + self.cache.nbytes

    def join(self) -> None:
        """Let the current stream wait until all new tokens are in the host pool; every pass must begin with this."""
        if self._last_written is not None:
            self._streams.wait(self._last_written)
            self._last_written = None
        if self._turn < self._turns:
            self._abandon()

    def begin(self, batch: PrefillPass) -> Sequence[StagedGroup]:
        """Plan a pass and start to copy the first layer's prefix pages.

        Returns:
            The groups, in the order in which every layer processes them.
        """
        self.join()
        self.cache.forget(batch.indices)
        # The tables of the last pass may be freed, because the current stream has waited for all their readers.
        self._groups = plan_pass(batch, self.cache, self._max_pages)
        self._turn, self._turns = 0, len(self._host_kv) * len(self._groups)
        begun = self._streams.record()
        for buffer in self._buffers:
            buffer.read = buffer.written = begun
        self._fetch(0)
        return self._groups

    def layer(self, layer: int, keys: Tensor, values: Tensor) -> Iterator[Staged]:
        """Yield each group of one layer with its filled buffer.

        All operations that read a yielded buffer must be launched, on the current stream, before the next buffer is
        requested. The loop must run to its end.

        Args:
            layer: layer of this rank; each pass must process all layers in their order.
            keys, values: [T, H, D], K and V of the pass's new tokens.

        Raises:
            RuntimeError: the layers are not processed in their order.
        """
        for i, group in enumerate(self._groups):
            if self._turn != layer * len(self._groups) + i:
                raise RuntimeError(
                    f"Layer {layer} was prefilled at turn {self._turn} of {self._turns}, with {len(self._groups)} "
                    f"groups per layer: begin a pass first, and run all layers in their order."
                )
            buffer = self._buffers[self._turn % 2]
            self._fetch(self._turn + 1)
            self._streams.wait(buffer.fetched)
            store_tokens(buffer.kv, None, group.positions, keys[group.tokens], values[group.tokens])
            self._write_back(layer, group, buffer)
            yield Staged(group, buffer.kv)
            buffer.read = self._streams.record()
            self._turn += 1

    def _abandon(self) -> None:
        """Clean up after a pass that stopped between its layers; its copies may still be running."""
        self._turn = self._turns = 0
        self.cache.clear()
        for buffer in self._buffers:
            if buffer.fetched is not None:
                self._streams.wait(buffer.fetched)

    def _fetch(self, turn: int) -> None:
        if turn >= self._turns:
            return
        layer, group = divmod(turn, len(self._groups))
        buffer = self._buffers[turn % 2]
        with self._streams.side(FETCH):
            self._streams.wait(buffer.read)
            self._streams.wait(buffer.written)
            stage_pages(buffer.kv, self.cache.arena[layer], self._host_kv[layer], self._groups[group].copies)
            buffer.fetched = self._streams.record()

    def _write_back(self, layer: int, group: StagedGroup, buffer: _Buffer) -> None:
        stored = self._streams.record()
        with self._streams.side(WRITE_BACK):
            self._streams.wait(stored)
            write_back(buffer.kv, self._host_kv[layer], group.runs)
            buffer.written = self._last_written = self._streams.record()
