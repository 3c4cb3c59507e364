"""Prefill staging: attention finds in the buffers what the host pool holds, and new tokens reach their pages."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_oasis.ops.device_step import summarise_blocks
from sglang_oasis.ops.staging import forget_pages
from sglang_oasis.ops.streams import SerialStreams
from sglang_oasis.ops.summary import SUMMARY_FORMATS, summarise
from sglang_oasis.tier.prefill import page_cache, staging
from sglang_oasis.tier.prefill.page_cache import PageCache
from sglang_oasis.tier.prefill.plan import PrefillPass, groups
from sglang_oasis.tier.prefill.staging import PrefillStaging
from test.cases.staging_cases import BLOCK, DIM, HEADS, LAYERS, Request, World, layout, prefill, same

SEEDS = st.integers(0, 10_000)


@settings(max_examples=60, deadline=None)
@given(data=st.data(), seed=SEEDS, cache_places=st.sampled_from([0, 1, 3, 7, 40]))
def test_staged_pages_are_the_host_pages_under_any_schedule(data: st.DataObject, seed: int, cache_places: int) -> None:
    """Chunks of any size, shared prefixes, decode steps, freed and reused pages; the cache never serves what was."""
    world = World(seed=seed, cache_places=cache_places)
    live: list[Request] = []
    for _ in range(data.draw(st.integers(3, 12))):
        action = data.draw(st.sampled_from(["prefill", "prefill", "prefill", "decode", "release"]))
        if action == "release" and live:
            request = live.pop(data.draw(st.integers(0, len(live) - 1)))
            world.release(request, {page for other in live for page in other.pages})
        elif action == "decode" and live:
            request = data.draw(st.sampled_from(live))
            for _ in range(data.draw(st.integers(1, 2 * BLOCK))):
                world.decode(request)
        elif action == "prefill":
            if data.draw(st.booleans()) or not live:
                parent = data.draw(st.sampled_from(live)) if live else None
                most = len(parent.tokens) // BLOCK if parent else 0
                request = world.admit(parent, data.draw(st.integers(0, most)))
                if request is not None:
                    live.append(request)
            requests = data.draw(st.lists(st.sampled_from(live), min_size=1, max_size=4, unique=True))
            counts = [world.extend(request, data.draw(st.integers(0, 30))) for request in requests]
            prefill(world, requests, counts)


def test_a_page_that_decode_filled_is_not_taken_for_the_one_that_was_cached_before() -> None:
    world = World(cache_places=40)
    first = world.admit()
    assert first is not None
    for count in (3 * BLOCK, 1):
        prefill(world, [first], [world.extend(first, count)])  # the second chunk caches the first one's pages
    world.release(first, still_used=set())
    second = world.admit()
    assert second is not None
    for _ in range(2 * BLOCK):
        world.decode(second)
    assert second.pages == first.pages[:2]
    prefill(world, [second], [world.extend(second, 1)])


def test_a_prefix_that_was_staged_before_is_not_read_from_the_host_again() -> None:
    world = World(cache_places=40)
    request = world.admit()
    assert request is not None
    for _ in range(2):
        prefill(world, [request], [world.extend(request, 2 * BLOCK)])
    prefill(world, [request], [world.extend(request, 1)])  # reads, and caches, all pages of the prefix
    count = world.extend(request, 1)
    (group,) = world.staging.begin(world.batch([request], [count]))
    complete = group.copies.pages[:4]
    assert group.copies.hits.tolist() == [*(complete % 40).tolist(), -1]  # the open page comes from the host
    assert same(world.staging.cache.arena[1, complete.long() % 40], world.host[1][complete.long()])


def test_completed_pages_are_summarised_from_the_buffer() -> None:
    world = World()
    request, fmt = world.admit(), SUMMARY_FORMATS["int4"]
    assert request is not None
    prefill(world, [request], [world.extend(request, BLOCK + 3)])
    count = world.extend(request, 2 * BLOCK)
    (group,) = world.staging.begin(world.batch([request], [count]))
    assert group.completed_pages.tolist() == request.pages[1:3]
    records = torch.zeros((40, HEADS, fmt.record_bytes(DIM)), dtype=torch.uint8)
    keys, values = world.new_kv([request], [count], 0)
    for staged in world.staging.layer(0, keys, values):
        summarise_blocks(staged.kv, group.completed_places, records, group.completed_pages, fmt)
    for page in request.pages[1:3]:
        assert torch.equal(records[page], summarise(world.host[0][page, :, 0], fmt))


@settings(max_examples=200, deadline=None)
@given(lengths=st.lists(st.integers(0, 64), min_size=1, max_size=12), max_pages=st.integers(8, 20))
def test_groups_keep_the_order_and_fit_the_buffer_and_none_could_take_the_next_request(
    lengths: list[int], max_pages: int
) -> None:
    found = groups(lengths, BLOCK, max_pages)
    pages = [-(-length // BLOCK) for length in lengths]
    assert [i for group in found for i in range(*group.indices(len(lengths)))] == [*range(len(lengths))]
    assert all(sum(pages[group]) <= max_pages for group in found)
    assert all(sum(pages[group]) + pages[group.stop] > max_pages for group in found[:-1])


def test_a_request_larger_than_the_buffer_is_refused() -> None:
    with pytest.raises(ValueError, match="A request of 9 pages does not fit into a staging buffer of 8 pages"):
        groups([BLOCK, 8 * BLOCK + 1], BLOCK, 8)
    with pytest.raises(ValueError, match="A staging buffer of 7 pages is too small for a request of 8"):
        World(max_pages=7)


@settings(max_examples=50, deadline=None)
@given(
    requests=st.lists(st.tuples(st.integers(0, 30), st.integers(0, 20)), min_size=1, max_size=5),
    max_pages=st.integers(8, 30),
)
def test_the_page_table_for_flashinfer_names_the_same_places(requests: list[tuple[int, int]], max_pages: int) -> None:
    world = World(pages=60, max_pages=max_pages, cache_places=0)
    members = []
    for prefix, new in requests:
        member = world.admit()
        assert member is not None
        world.extend(member, prefix)
        members.append((member, world.extend(member, new)))
    for group in world.staging.begin(world.batch([m for m, _ in members], [count for _, count in members])):
        table = group.pages
        for place, i in enumerate(range(*group.requests.indices(len(members)))):
            used = table.indices[table.indptr[place] : table.indptr[place + 1]]
            assert torch.equal(used, group.slots[place, : len(used)])
            length = (len(used) - 1) * BLOCK + int(table.last_page_len[place]) if len(used) else 0
            assert length == group.kv_lengths[place] == (len(members[i][0].tokens) if members[i][1] else 0)
        assert torch.equal(table.query_starts, group.query_starts)


@settings(max_examples=200, deadline=None)
@given(data=st.data(), places=st.integers(1, 6))
def test_the_cache_keeps_what_it_reads_and_gives_a_place_to_one_page(data: st.DataObject, places: int) -> None:
    cache = PageCache(layout(1), places, torch.device("cpu"))
    for _ in range(data.draw(st.integers(1, 6))):
        pages = data.draw(st.lists(st.integers(0, 11), max_size=6))
        complete = data.draw(st.lists(st.booleans(), min_size=len(pages), max_size=len(pages)))
        before = cache.tags.clone()
        hits, fills = cache.place(torch.tensor(pages, dtype=torch.int32), torch.tensor(complete, dtype=torch.int32))
        wanted = [(i, page) for i, page in enumerate(pages) if complete[i]]
        held = {page for _, page in wanted if before[page % places] == page}
        expected = before.clone()
        winners = {}
        for i, page in wanted:
            if page not in held and before[page % places].item() not in held:
                winners[page % places] = i
                expected[page % places] = page
        assert hits.tolist() == [p % places if c and p in held else -1 for p, c in zip(pages, complete, strict=True)]
        assert fills.tolist() == [p % places if winners.get(p % places) == i else -1 for i, p in enumerate(pages)]
        assert torch.equal(cache.tags, expected)
        written = data.draw(st.lists(st.integers(-1, 12 * BLOCK - 1), max_size=4))
        cache.forget(torch.tensor(written, dtype=torch.int64))
        gone = {index // BLOCK for index in written if index >= 0}
        assert cache.tags.tolist() == [-1 if tag in gone else tag for tag in expected.tolist()]


def test_two_tokens_whose_pages_share_a_place_forget_the_one_that_is_there() -> None:
    for indices in ([3 * BLOCK, 7 * BLOCK], [7 * BLOCK, 3 * BLOCK]):
        tags = torch.tensor([-1, -1, -1, 3], dtype=torch.int32)
        forget_pages.reference(tags, torch.tensor(indices), BLOCK)
        assert tags.tolist() == [-1, -1, -1, -1]


def test_a_cache_takes_the_bytes_that_it_is_given_and_no_more_than_the_host_has_pages() -> None:
    page_bytes = LAYERS * HEADS * 2 * BLOCK * DIM * 4
    places = PageCache.places_in(layout(), 10 * page_bytes)
    assert places == 9
    assert PageCache(layout(), places, torch.device("cpu")).nbytes == 9 * (page_bytes + 4)
    assert PageCache.places_in(layout(), -1) == 0
    world = World(pages=30, cache_places=1000, max_pages=9)
    assert len(world.staging.cache.tags) == 30
    buffers = PrefillStaging.bytes_of(layout(), 9)
    assert buffers == 2 * 9 * page_bytes // LAYERS
    assert world.staging.nbytes == buffers + 30 * (page_bytes + 4)


def test_a_pass_that_stopped_between_layers_leaves_nothing_in_the_cache() -> None:
    world = World(cache_places=40)
    request = world.admit()
    assert request is not None
    prefill(world, [request], [world.extend(request, 3 * BLOCK)])
    count = world.extend(request, 1)
    world.staging.begin(world.batch([request], [count]))  # decides to cache three pages, and fetches one layer
    for layer in range(1):
        for _ in world.staging.layer(layer, *world.new_kv([request], [count], layer)):
            pass
    prefill(world, [request], [count])


def test_layers_come_in_their_order() -> None:
    world = World()
    request = world.admit()
    assert request is not None
    count = world.extend(request, 5)
    world.staging.begin(world.batch([request], [count]))
    with pytest.raises(RuntimeError, match="Layer 1 was prefilled at turn 0"):
        next(world.staging.layer(1, *world.new_kv([request], [count], 1)))


def test_nothing_waits_for_the_device() -> None:
    """Tensors without memory: whatever asked for one's content, or for a shape that depends on it, would fail."""
    device = torch.device("meta")
    host = [torch.empty((40, HEADS, 2, BLOCK, DIM)) for _ in range(LAYERS)]
    stages = PrefillStaging(layout(), host, max_pages=8, cache_places=5, device=device, streams=SerialStreams())
    batch = PrefillPass(
        rows=torch.empty(3, dtype=torch.int64, device=device),
        prefixes=[20, 0, 16],
        new_tokens=[9, 13, 1],
        indices=torch.empty(23, dtype=torch.int64, device=device),
        req_to_token=torch.empty((6, 64), dtype=torch.int32, device=device),
    )
    moves = {name: mock.Mock() for name in ("stage_pages", "write_back", "store_tokens")}
    with mock.patch.multiple(staging, **moves), mock.patch.object(page_cache, "forget_pages") as forget:
        assert [group.requests for group in stages.begin(batch)] == [slice(0, 2), slice(2, 3)]
        for layer in range(LAYERS):
            keys = torch.empty((23, HEADS, DIM), device=device)
            assert [staged.group.tokens for staged in stages.layer(layer, keys, keys)] == [slice(0, 22), slice(22, 23)]
    assert forget.call_count == 1
    assert [move.call_count for move in moves.values()] == [2 * LAYERS] * 3
