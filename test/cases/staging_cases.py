"""A small model's host pool under SGLang-like use, with every token's K and V known beside it."""

from __future__ import annotations

import torch
from torch import Tensor

from sglang_oasis.ops.attention import paged_attention
from sglang_oasis.ops.streams import Streams, streams_of
from sglang_oasis.ops.summary import SUMMARY_FORMATS
from sglang_oasis.tier.layout import TierLayout
from sglang_oasis.tier.prefill.plan import PrefillPass
from sglang_oasis.tier.prefill.staging import PrefillStaging
from test.cases.places import CPU, Place

LAYERS, HEADS, GROUP, BLOCK, DIM = 3, 2, 2, 8, 16
CONTEXT = 64
NAN = float("nan")
SCALE = 0.3


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
        streams: Streams | None = None, place: Place = CPU,
    ) -> None:  # fmt: skip
        self.rng = torch.Generator().manual_seed(seed)
        self.place = place
        self.host = [place.pin(torch.full((pages, HEADS, 2, BLOCK, DIM), NAN)) for _ in range(LAYERS)]
        self.req_to_token = torch.zeros((rows, CONTEXT), dtype=torch.int32, device=place.device)
        self.free_pages = torch.randperm(pages, generator=self.rng).tolist()
        self.free_rows = list(range(rows))
        self.staging = PrefillStaging(
            layout(),
            self.host,
            max_pages=max_pages,
            cache_places=cache_places,
            device=place.device,
            streams=streams or streams_of(place.device),
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
        put = self.place.put
        return PrefillPass(put(rows), prefixes, counts, put(torch.cat(indices)), self.req_to_token)

    def new_kv(self, requests: list[Request], counts: list[int], layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values [T, H, D] of the new tokens."""
        new = [
            request.tokens[len(request.tokens) - count :, layer]
            for request, count in zip(requests, counts, strict=True)
        ]
        keys, values = self.place.put(torch.cat(new)).unbind(2)
        return keys, values

    def decode(self, request: Request) -> None:
        """One token that a decode step writes to its host page."""
        if self.extend(request, 1):
            length = len(request.tokens)
            index = request.indices(length - 1, length)
            page, offset = int(index) // BLOCK, int(index) % BLOCK
            for layer in range(LAYERS):
                self.host[layer][page, :, :, offset] = request.tokens[-1, layer]
            self.staging.cache.forget(self.place.put(index))

    def release(self, request: Request, still_used: set[int]) -> None:
        """Free a request; its pages are the next ones that are handed out."""
        self.free_rows.append(request.row)
        self.free_pages[:0] = [page for page in request.pages if page not in still_used]

    def _publish(self, request: Request) -> None:
        length = len(request.tokens)
        if length:
            self.req_to_token[request.row, :length] = self.place.put(request.indices(0, length).int())

    def wait(self) -> None:
        """Until the device has done everything."""
        if self.place.device.type == "cuda":
            torch.cuda.synchronize(self.place.device)


def prefill(world: World, requests: list[Request], counts: list[int]) -> None:
    """Run a pass and check all that it promises."""
    batch = world.batch(requests, counts)
    for buffer in world.staging._buffers:
        buffer.kv.fill_(NAN)
    groups_ = world.staging.begin(batch)
    lengths = [len(request.tokens) if count else 0 for request, count in zip(requests, counts, strict=True)]
    assert [i for group in groups_ for i in range(*group.requests.indices(len(requests)))] == [*range(len(requests))]
    for layer in range(LAYERS):
        keys, values = world.new_kv(requests, counts, layer)
        expected_host, written = world.host[layer].clone(), batch.indices.cpu()
        pages, offsets = written // BLOCK, written % BLOCK
        expected_host[pages, :, 0, offsets], expected_host[pages, :, 1, offsets] = keys.cpu(), values.cpu()
        query = torch.randn((len(keys), HEADS * GROUP, DIM), generator=world.rng)
        for staged in world.staging.layer(layer, keys, values):
            group, members = staged.group, range(*staged.group.requests.indices(len(requests)))
            kv, sequences = staged.kv.cpu(), (group.slots.cpu(), group.kv_lengths.cpu(), group.query_starts.cpu())
            for place, i in enumerate(members):
                found = kv[group.starts[place] : group.starts[place + 1]].transpose(2, 3).flatten(3)
                found = found.transpose(1, 2).flatten(0, 1).unflatten(-1, (2, DIM))[: lengths[i]]
                assert same(found, requests[i].tokens[: lengths[i], layer])
            out = paged_attention.reference(
                query[group.tokens], kv, torch.arange(len(members)), *sequences, SCALE,
            )  # fmt: skip
            host_table = torch.nn.utils.rnn.pad_sequence(
                [torch.tensor(requests[i].pages if lengths[i] else [0], dtype=torch.int32) for i in members],
                batch_first=True,
            )
            in_place = paged_attention.reference(
                query[group.tokens], expected_host, torch.arange(len(members)), host_table, *sequences[1:], SCALE,
            )  # fmt: skip
            assert torch.equal(out, in_place)
            assert out.isfinite().all()
        world.wait()
        assert same(world.host[layer], expected_host)


def prefill_with_shared_pages(world: World) -> None:
    """Chunks, a shared prefix that the cache holds, two groups per layer, a page that changes hands.

    Args:
        world: with a cache of 6 places and buffers of 8 pages.
    """
    first = world.admit()
    assert first is not None
    for count in (13, 20, 5):
        prefill(world, [first], [world.extend(first, count)])
    second = world.admit(first, 4)
    assert second is not None
    members = [first, second]
    for _ in range(2):
        prefill(world, members, [world.extend(member, 9) for member in members])
    world.release(first, still_used=set(second.pages))
    third = world.admit(second, 2)
    assert third is not None
    for count in (20, 4):
        prefill(world, [third, second], [world.extend(third, count), world.extend(second, 1)])
