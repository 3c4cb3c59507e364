"""The Triton ops against their references, one random case at a time, on any place."""

from __future__ import annotations

import torch

from sglang_oasis.kernels.triton import overrides
from sglang_oasis.ops import device_step
from sglang_oasis.ops.device_step import Admitting, Among, DeviceAdmissions, Mark, NewTokens, Ranking
from sglang_oasis.ops.summary import SUMMARY_FORMATS, SummaryFormat
from test.cases.device_step_cases import (
    ODD,
    Shape,
    assert_same_bits,
    empty_admissions,
    entries,
    fill_summaries,
    make_layer,
    make_token_step,
    poisoned,
)
from test.cases.kernel_cases import SCALED_TOLERANCES, fitted, generator, occupied_maps
from test.cases.places import CPU, Place

SMALL_TILES = {"SCORE_TILE": 16, "RANK_TILE": 32, "TILES_AT_ONCE": 2, "COPY_TILE": 512}
"""Of `launches`, so that small cases have several of them."""
TOLERANCES = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}


def check_take_tokens(
    place: Place,
    fmt: SummaryFormat,
    shape: Shape,
    tokens: int,
    first: int,
    padding: int,
    key_dtype: torch.dtype,
    host_dtype: torch.dtype,
    seed: int,
) -> None:
    rng = generator(seed)
    fmt = fitted(fmt, shape.heads, shape.head_dim, rng)
    layer = make_layer(shape, fmt, rng)
    layer = layer._replace(host_kv=layer.host_kv.to(host_dtype))
    table, new = make_token_step(layer, 2, padding, tokens, first, rng)
    new = new._replace(keys=new.keys.to(key_dtype), values=new.values.to(key_dtype))
    expected = layer.copy()
    device_step.take_tokens.reference(expected.state, table, new, fmt)
    layer = layer.on(place)
    indices, keys, values = (place.put(tensor) for tensor in new[:3])
    overrides.take_tokens(layer.state, place.put_all(table), NewTokens(indices, keys, values, first), fmt)
    assert_same_bits(layer.memory(), expected.memory())


def check_score_blocks(
    place: Place,
    fmt: SummaryFormat,
    shape: Shape,
    group: int,
    num_queries: int,
    query_dtype: torch.dtype,
    smoothed: bool,
    sinks: int,
    tightness: float,
    seed: int,
) -> None:
    rng = generator(seed)
    shape = shape._replace(logical=70)  # many tiles of either kernel, and more than are combined at once
    fmt = fitted(fmt, shape.heads, shape.head_dim, rng)
    layer = make_layer(shape, fmt, rng)
    counts = torch.randint(0, shape.logical + 1, (2,), generator=rng)
    counts[0] = int(torch.randint(0, 2, (1,), generator=rng)) * counts[0]
    fill_summaries(layer, counts, fmt, rng)
    rows = entries(2, 2, rng)
    candidates = torch.cat([torch.zeros(1, dtype=torch.int64), counts])[rows].int()
    whole = torch.randn((len(rows), num_queries, shape.heads * (group + 1), shape.head_dim), generator=rng)
    queries = whole.to(query_dtype)[:, :, : shape.heads * group]
    averages = None
    if smoothed:
        averages = torch.rand((shape.rows, shape.heads, shape.logical), generator=rng) * 0.2
        averages[torch.rand(averages.shape, generator=rng) < 0.2] = -1.0
        beyond = torch.arange(shape.logical) >= torch.cat([torch.zeros(1, dtype=torch.int64), counts])[:, None, None]
        averages.masked_fill_(beyond, float("nan"))
    expected_averages = None if averages is None else averages.clone()
    ranking = Ranking(fmt, 0.3, tightness, 0.8, sinks)
    expected = device_step.score_blocks.reference(
        queries, layer.summaries, Among(rows, candidates), ranking, expected_averages
    )
    queries, summaries, rows, candidates = map(place.put, (queries, layer.summaries, rows, candidates))
    averages = None if averages is None else place.put(averages)
    got = overrides.score_blocks(queries, summaries, Among(rows, candidates), ranking, averages)
    tolerance = 2e-4 if fmt.scaling is None else SCALED_TOLERANCES[query_dtype]  # scaled queries are rounded
    torch.testing.assert_close(got.cpu(), expected, rtol=tolerance, atol=1e-6)
    if averages is not None:
        torch.testing.assert_close(averages.cpu(), expected_averages, rtol=tolerance, atol=1e-6, equal_nan=True)


def check_select_admissions(
    place: Place, heads: int, selected: int, most: int, cap: int, padding: int, emptied: bool, seed: int
) -> None:
    rng = generator(seed)
    logical, most = 14, min(most, selected)
    maps = occupied_maps(3, heads, selected, logical, rng)
    if emptied:
        maps.slot_of[1:, :, :].masked_fill_(maps.slot_of[1:] == 0, -1)
        maps.head_map[1:, :, 0] = -1
    rows = entries(2, padding, rng)
    counts = torch.randint(selected, logical + 1, (len(rows),), generator=rng)
    counts[rows == 0] = 0
    counts[0] *= int(torch.randint(0, 2, (1,), generator=rng))
    ranking = torch.rand((len(rows), heads, logical), generator=rng)
    ranking.masked_fill_(torch.arange(logical) >= counts[:, None, None], float("-inf"))
    predicted = ranking.topk(selected, dim=-1).indices
    results = []
    for op, where in ((device_step.select_admissions.reference, CPU), (overrides.select_admissions, place)):
        held = where.put_all(maps)
        admissions = where.put_all(empty_admissions(len(rows), heads, most))
        counters, number, limit = where.put(torch.tensor([5, 7])), *where.put(torch.tensor([[9], [cap]]).int())
        among = Among(where.put(rows), where.put(counts.int()))
        op(where.put(predicted), among, held, Mark(number, 1), Admitting(limit, admissions, counters))
        results.append((*admissions, counters, *held))
    for got, expected in zip(results[1], results[0], strict=True):
        assert torch.equal(got.cpu(), expected)


def check_fetch_blocks(
    place: Place, shape: Shape, host_dtype: torch.dtype, padding: int, emptied: bool, seed: int
) -> None:
    rng = generator(seed)
    layer = make_layer(shape, SUMMARY_FORMATS["int4"], rng)
    rows = entries(2, padding, rng)
    pages = torch.randn(layer.host_kv.shape, generator=rng).to(host_dtype)
    layer = layer._replace(host_kv=poisoned(tuple(pages.shape), host_dtype))
    if emptied:
        layer.maps.slot_of[1:].masked_fill_(layer.maps.slot_of[1:] == 0, -1)
        layer.maps.head_map[1:, :, 0] = -1
    admissions = DeviceAdmissions(*torch.full((2, len(rows), shape.heads, shape.selected), -1, dtype=torch.int32))
    for i, row in enumerate(rows.tolist()):
        for head in range(shape.heads if row else 0):
            missing = (layer.maps.slot_of[row, head] < 0).nonzero().flatten()
            missing = missing[torch.randperm(len(missing), generator=rng)]
            slots = torch.randperm(shape.selected, generator=rng)
            count = int(torch.randint(0, min(len(missing), shape.selected) + 1, (1,), generator=rng))
            admissions.blocks[i, head, :count] = missing[:count].int()
            admissions.slots[i, head, :count] = slots[:count].int()
            for block in missing[:count].tolist():
                page = int(layer.req_to_token[row, block * shape.block_size]) // shape.block_size
                layer.host_kv[page, head] = pages[page, head]
    memories, number = [], torch.tensor([21], dtype=torch.int32)
    for op, where in ((device_step.fetch_blocks.reference, CPU), (overrides.fetch_blocks, place)):
        tiers = layer.on(where)
        op(tiers.state, where.put(rows), where.put_all(admissions), Mark(where.put(number), 1))
        memories.append(tiers.memory())
    assert_same_bits(memories[1], memories[0])


def check_attend(
    place: Place,
    paged: bool,
    tokens: list[int],
    heads: int,
    group: int,
    size: int,
    dim: int,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    seed: int,
) -> None:
    rng = generator(seed)
    width, places, n = 5, 8, len(tokens)
    queries = torch.tensor(tokens)
    lengths = torch.maximum(queries, torch.tensor(1)) + torch.randint(0, (width - 1) * size, (n,), generator=rng)
    whole = poisoned((n * places if paged else n + 1, heads, *(() if paged else (places,)), 2, size, dim), kv_dtype)
    slots = torch.randperm(n * places, generator=rng)[: n * width].view(n, width)
    rows = 1 + torch.randperm(n, generator=rng)
    if not paged:
        slots = torch.stack([torch.randperm(places, generator=rng)[:width] for _ in range(n)])
    for i, length in enumerate(lengths.tolist()):
        vectors = torch.randn((heads, 2, length, dim), generator=rng).to(kv_dtype)
        for t in range(length):
            held = whole[slots[i, t // size]] if paged else whole[rows[i], :, slots[i, t // size]]
            held[:, :, t % size] = vectors[:, :, t]
        slots[i, -(-length // size) :] = -(10**6)
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), queries.cumsum(0)]).int()
    query = torch.randn((int(starts[-1]), heads * group + 1, dim), generator=rng).to(dtype)[:, 1:]
    arguments = (query, whole, rows, slots.int(), lengths.int(), starts, dim**-0.5)
    expected = device_step.attend.reference(*arguments, 4)
    got = overrides.attend(*(place.put(x) if isinstance(x, torch.Tensor) else x for x in arguments), 4)
    assert got.dtype == dtype
    tolerance = TOLERANCES[dtype]
    torch.testing.assert_close(got.cpu(), expected, rtol=tolerance, atol=tolerance)


def check_summarise_blocks(
    place: Place, fmt: SummaryFormat, heads: int, size: int, dim: int, dtype: torch.dtype, magnitude: float, seed: int
) -> None:
    rng = generator(seed)
    fmt = fitted(fmt, heads, dim, rng)
    kv = (torch.randn((5, heads, 2, size, dim), generator=rng) * magnitude).to(dtype)
    kv += 0.0  # turns -0.0 into 0.0: which of the two is the smaller one is left open
    kv[:, :, 1] = float("nan")
    kv[4] = float("nan")
    sources, targets = torch.tensor([2, -1, 0, 3]), torch.tensor([0, 1, 5, 2])
    got = torch.full((6, heads, fmt.record_bytes(dim)), ODD, dtype=torch.uint8)
    expected = got.clone()
    device_step.summarise_blocks.reference(kv, sources, expected, targets, fmt)
    kv, sources, got, targets = map(place.put, (kv, sources, got, targets))
    overrides.summarise_blocks(kv, sources, got, targets, fmt)
    assert torch.equal(got.cpu(), expected)
