"""A small model's host pool under SGLang-like use, with every token's K and V known beside it."""

from __future__ import annotations

import torch
from torch import Tensor

from sglang_oasis.ops.streams import SerialStreams, Streams
from sglang_oasis.ops.summary import SUMMARY_FORMATS
from sglang_oasis.tier.layout import TierLayout
from sglang_oasis.tier.staging import PrefillStaging
from sglang_oasis.tier.staging_plan import PrefillPass

LAYERS, HEADS, GROUP, BLOCK, DIM = 3, 2, 2, 8, 16
CONTEXT = 64
NAN = float("nan")


def layout(layers: int = LAYERS) -> TierLayout:
    blocks = CONTEXT // BLOCK
    return TierLayout(
        num_layers=layers,
        kv_heads=HEADS,
        head_dim=DIM,
        dtype=torch.float32,
        block_size=BLOCK,
        selected_blocks=(blocks,) * layers,
        recent_blocks=1,
        sink_blocks=0,
        max_blocks=blocks,
        summary_format=SUMMARY_FORMATS["int4"],
    )


def same(left: Tensor, right: Tensor) -> bool:
    """Equal bit for bit, NaN included."""
    return torch.equal(left.contiguous().view(torch.int32), right.contiguous().view(torch.int32))


class Request:
    """A request: its row, its pages, and K and V of its tokens [length, L, H, 2, D]."""

    def __init__(self, row: int, pages: list[int], tokens: Tensor) -> None:
        self.row = row
        self.pages = pages
        self.tokens = tokens

    def indices(self, first: int, last: int) -> Tensor:
        """KV indices of tokens `first` to `last`."""
        positions = torch.arange(first, last)
        return torch.tensor(self.pages, dtype=torch.int64)[positions // BLOCK] * BLOCK + positions % BLOCK


class World:
    """The host pool, SGLang's tables, and a staging that serves prefill passes; memory that nobody wrote is NaN."""

    def __init__(
        self, *, pages: int = 40, rows: int = 6, max_pages: int = 12, cache_places: int = 5, seed: int = 0,
        streams: Streams | None = None,
    ) -> None:  # fmt: skip
        self.rng = torch.Generator().manual_seed(seed)
        self.host = [torch.full((pages, HEADS, 2, BLOCK, DIM), NAN) for _ in range(LAYERS)]
        self.req_to_token = torch.zeros((rows, CONTEXT), dtype=torch.int32)
        self.free_pages = torch.randperm(pages, generator=self.rng).tolist()
        self.free_rows = list(range(rows))
        self.staging = PrefillStaging(
            layout(),
            self.host,
            max_pages=max_pages,
            cache_places=cache_places,
            device=torch.device("cpu"),
            streams=streams or SerialStreams(),
        )
        self.staging.cache.arena.fill_(NAN)

    def admit(self, shared: Request | None = None, shared_pages: int = 0) -> Request | None:
        """A request whose prefix is some complete pages of another one."""
        if not self.free_rows:
            return None
        request = Request(self.free_rows.pop(), [], torch.empty((0, LAYERS, HEADS, 2, DIM)))
        if shared is not None:
            request.pages = shared.pages[:shared_pages]
            request.tokens = shared.tokens[: shared_pages * BLOCK].clone()
            self._publish(request)
        return request

    def extend(self, request: Request, count: int) -> int:
        """Add `count` random tokens to a request, fewer if memory is short; returns how many."""
        length = len(request.tokens)
        room = (len(request.pages) + len(self.free_pages)) * BLOCK
        count = max(0, min(count, CONTEXT - length, room - length))
        while len(request.pages) * BLOCK < length + count:
            request.pages.append(self.free_pages.pop(0))
        new = torch.randn((count, LAYERS, HEADS, 2, DIM), generator=self.rng)
        request.tokens = torch.cat([request.tokens, new])
        self._publish(request)
        return count

    def batch(self, requests: list[Request], counts: list[int]) -> PrefillPass:
        """The pass in which the last `counts` tokens of the requests are new."""
        prefixes = [len(request.tokens) - count for request, count in zip(requests, counts, strict=True)]
        indices = [
            request.indices(prefix, len(request.tokens)) for request, prefix in zip(requests, prefixes, strict=True)
        ]
        rows = torch.tensor([request.row for request in requests])
        return PrefillPass(rows, prefixes, counts, torch.cat(indices), self.req_to_token)

    def new_kv(self, requests: list[Request], counts: list[int], layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values [T, H, D] of the new tokens."""
        new = [
            request.tokens[len(request.tokens) - count :, layer]
            for request, count in zip(requests, counts, strict=True)
        ]
        keys, values = torch.cat(new).unbind(2)
        return keys, values

    def decode(self, request: Request) -> None:
        """One token that a decode step writes to its host page."""
        if self.extend(request, 1):
            length = len(request.tokens)
            index = request.indices(length - 1, length)
            page, offset = int(index) // BLOCK, int(index) % BLOCK
            for layer in range(LAYERS):
                self.host[layer][page, :, :, offset] = request.tokens[-1, layer]
            self.staging.cache.forget(index)

    def release(self, request: Request, still_used: set[int]) -> None:
        """Free a request; its pages are the next ones that are handed out."""
        self.free_rows.append(request.row)
        self.free_pages[:0] = [page for page in request.pages if page not in still_used]

    def _publish(self, request: Request) -> None:
        length = len(request.tokens)
        if length:
            self.req_to_token[request.row, :length] = request.indices(0, length).int()
