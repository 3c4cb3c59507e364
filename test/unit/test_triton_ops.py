"""The Triton kernels, run by Triton's interpreter, against the references of the ops."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_oasis.ops import device_step, triton_launches, triton_ops
from sglang_oasis.ops.device_step import DeviceAdmissions
from sglang_oasis.ops.summary import SUMMARY_FORMATS, SummaryFormat
from test.unit.device_step_cases import (
    ODD,
    SHAPES,
    Shape,
    assert_same_bits,
    empty_admissions,
    entries,
    few,
    fill_summaries,
    make_layer,
    make_token_step,
    poisoned,
)
from test.unit.kernel_cases import BLOCK_SIZES, DTYPES, FORMATS, SEEDS, generator, occupied_maps

HEAD_DIMS = st.sampled_from([16, 64, 80, 96, 128])


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that small cases have several of them."""
    for name, size in {"SCORE_TILE": 16, "RANK_TILE": 32, "TILES_AT_ONCE": 2, "COPY_TILE": 512}.items():
        monkeypatch.setattr(triton_launches, name, size)


@FORMATS
@few
@given(
    shape=SHAPES,
    tokens=st.integers(1, 4),
    first=st.integers(0, 2),
    padding=st.integers(0, 2),
    key_dtype=DTYPES,
    host_dtype=DTYPES,
    seed=SEEDS,
)
def test_tokens_are_taken_into_both_tiers(
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
    layer = make_layer(shape, fmt, rng)
    layer = layer._replace(host_kv=layer.host_kv.to(host_dtype))
    table, indices, keys, values, first = make_token_step(layer, 2, padding, tokens, first, rng)
    keys, values = keys.to(key_dtype), values.to(key_dtype)
    expected = layer.copy()
    device_step.take_tokens.reference(*expected, table, indices, keys, values, first, fmt)
    triton_ops.take_tokens(*layer, table, indices, keys, values, first, fmt)
    assert_same_bits(layer.memory(), expected.memory())


@FORMATS
@few
@given(
    shape=SHAPES,
    group=st.integers(1, 5),
    num_queries=st.integers(1, 4),
    query_dtype=DTYPES,
    smoothed=st.booleans(),
    sinks=st.integers(0, 2),
    tightness=st.sampled_from([0.0, 0.6, 1.0]),
    seed=SEEDS,
)
def test_scores_rank_the_candidates_and_read_nothing_else(
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
    settings_of_both = (fmt, 0.3, tightness)
    expected = device_step.score_blocks.reference(
        queries, layer.summaries, rows, candidates, *settings_of_both, expected_averages, 0.8, sinks
    )
    got = triton_ops.score_blocks(queries, layer.summaries, rows, candidates, *settings_of_both, averages, 0.8, sinks)
    torch.testing.assert_close(got, expected, rtol=2e-4, atol=1e-6)
    torch.testing.assert_close(averages, expected_averages, rtol=2e-4, atol=1e-6, equal_nan=True)


@few
@given(
    heads=st.integers(1, 3),
    selected=st.integers(1, 9),
    most=st.integers(1, 9),
    cap=st.integers(0, 9),
    padding=st.integers(0, 2),
    emptied=st.booleans(),
    seed=SEEDS,
)
def test_admissions_are_those_of_algorithm_2(
    heads: int, selected: int, most: int, cap: int, padding: int, emptied: bool, seed: int
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
    ages = maps.last_selected.clone()
    results = []
    for op in (device_step.select_admissions.reference, triton_ops.select_admissions):
        maps.last_selected.copy_(ages)
        admissions, counters = empty_admissions(len(rows), heads, most), torch.tensor([5, 7])
        number, limit = torch.tensor([[9], [cap]], dtype=torch.int32)
        op(predicted, counts.int(), rows, maps, number, 1, limit, admissions, counters)
        results.append((*admissions, counters, maps.last_selected.clone()))
    for got, expected in zip(results[1], results[0], strict=True):
        assert torch.equal(got, expected)


@few
@given(shape=SHAPES, host_dtype=DTYPES, padding=st.integers(0, 2), emptied=st.booleans(), seed=SEEDS)
def test_admitted_blocks_are_fetched_bit_for_bit(
    shape: Shape, host_dtype: torch.dtype, padding: int, emptied: bool, seed: int
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
    expected, number = layer.copy(), torch.tensor([21], dtype=torch.int32)
    for tiers, op in ((expected, device_step.fetch_blocks.reference), (layer, triton_ops.fetch_blocks)):
        op(tiers.blocks, tiers.maps, tiers.host_kv, tiers.req_to_token, rows, admissions, number, 1)
    assert_same_bits(layer.memory(), expected.memory())


TOLERANCES = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}


@few
@given(
    paged=st.booleans(),
    tokens=st.lists(st.integers(0, 4), min_size=1, max_size=4),
    heads=st.integers(1, 2),
    group=st.integers(1, 5),
    size=BLOCK_SIZES,
    dim=HEAD_DIMS,
    dtype=DTYPES,
    kv_dtype=DTYPES,
    seed=SEEDS,
)
def test_attention_is_exact_and_causal(
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
    got = triton_ops.attend(*arguments, 4)
    assert got.dtype == dtype
    tolerance = TOLERANCES[dtype]
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)


@FORMATS
@few
@given(
    heads=st.integers(1, 2), size=BLOCK_SIZES, dim=HEAD_DIMS, dtype=DTYPES,
    magnitude=st.sampled_from([0.0, 1e-30, 1.0, 1e4]), seed=SEEDS,
)  # fmt: skip
def test_summaries_are_those_of_the_reference_byte_for_byte(
    fmt: SummaryFormat, heads: int, size: int, dim: int, dtype: torch.dtype, magnitude: float, seed: int
) -> None:
    rng = generator(seed)
    kv = (torch.randn((5, heads, 2, size, dim), generator=rng) * magnitude).to(dtype)
    kv += 0.0  # turns -0.0 into 0.0: which of the two is the smaller one is left open
    kv[:, :, 1] = float("nan")
    kv[4] = float("nan")
    sources, targets = torch.tensor([2, -1, 0, 3]), torch.tensor([0, 1, 5, 2])
    got = torch.full((6, heads, fmt.record_bytes(dim)), ODD, dtype=torch.uint8)
    expected = got.clone()
    device_step.summarise_blocks.reference(kv, sources, expected, targets, fmt)
    triton_ops.summarise_blocks(kv, sources, got, targets, fmt)
    assert torch.equal(got, expected)


def test_a_head_size_that_the_kernels_do_not_know_is_left_to_the_reference() -> None:
    query = torch.zeros(1, 1, 40)
    rows = starts = torch.zeros(1, dtype=torch.int64)
    blocks = torch.zeros(1, 1, 2, 8, 40)
    assert triton_ops.attend(query, blocks, rows, rows[None], rows, starts, 1.0, 1) is NotImplemented


def test_a_tensor_with_gaps_is_refused_by_name() -> None:
    blocks = torch.zeros(2, 1, 4, 2, 8, 16)[:, :, ::2]
    zeros = torch.zeros(1, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"^blocks has strides .*contiguous tensor\.$"):
        triton_ops.attend(torch.zeros(1, 1, 16), blocks, zeros, zeros[None].int(), zeros.int(), zeros.int(), 1.0, 1)


def test_admissions_wider_than_the_slots_are_refused() -> None:
    maps = occupied_maps(1, 1, 2, 4, generator(0))
    one, zeros = torch.ones(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int64)
    with pytest.raises(ValueError, match="3 blocks exceed the 2 selected slots"):
        triton_ops.select_admissions(
            torch.zeros(1, 1, 2, dtype=torch.int64), one, zeros, maps, one, 0, one, empty_admissions(1, 1, 3), zeros
        )
