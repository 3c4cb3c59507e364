"""The references of the device's ops do what the ops of the CPU path do; the kernels equal the references."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_oasis.kernels.triton import sources
from sglang_oasis.ops.attention import paged_attention
from sglang_oasis.ops.device_step import (
    Admitting,
    Among,
    DeviceAdmissions,
    Mark,
    Ranking,
    attend,
    fetch_blocks,
    score_blocks,
    select_admissions,
    summarise_blocks,
    take_tokens,
)
from sglang_oasis.ops.eviction import Admissions, admit_blocks, select_blocks
from sglang_oasis.ops.smoothing import smooth_scores
from sglang_oasis.ops.summary import SUMMARY_FORMATS, SummaryFormat, block_scores, summarise, summarise_pages
from test.cases.device_step_cases import (
    SHAPES,
    Shape,
    assert_same_bits,
    empty_admissions,
    entries,
    few,
    fill_summaries,
    make_layer,
    make_token_step,
)
from test.cases.kernel_cases import FORMATS, SEEDS, generator, occupied_maps

INT4 = SUMMARY_FORMATS["int4"]


@FORMATS
@few
@given(shape=SHAPES, tokens=st.integers(1, 4), first=st.integers(0, 2), padding=st.integers(0, 2), seed=SEEDS)
def test_a_step_of_tokens_changes_these_places_and_no_other(
    fmt: SummaryFormat, shape: Shape, tokens: int, first: int, padding: int, seed: int
) -> None:
    rng = generator(seed)
    layer = make_layer(shape, fmt, rng)
    step = make_token_step(layer, 2, padding, tokens, first, rng)
    before, after = layer.copy(), layer.copy()
    take_tokens.reference(after.state, *step, fmt)
    size, selected = shape.block_size, shape.selected
    for i, row in enumerate(step.table.rows.tolist()):
        if row == 0:
            continue
        for head in range(shape.heads):
            graduate = int(step.table.graduates[i])
            if 0 <= graduate < selected:
                left = before.blocks[row, head, selected + graduate % shape.local]
                before.blocks[row, head, graduate] = left
                before.maps.head_map[row, head, graduate] = before.maps.slot_of[row, head, graduate] = graduate
                before.maps.last_selected[row, head, graduate] = 2 * int(step.table.number) - 1
            for j in range(tokens):
                position = int(step.table.lengths[i]) - 1 + first + j
                page, offset = divmod(int(layer.req_to_token[row, position]), size)
                slot = selected + position // size % shape.local
                for half, vectors in enumerate((step.tokens.keys, step.tokens.values)):
                    vector = vectors[i * tokens + j, head].to(shape.dtype)
                    before.blocks[row, head, slot, half, position % size] = vector
                    before.host_kv[page, head, half, offset] = vector
            for block in (int(step.table.completed[i]), int(step.table.expected[i])):
                if block >= 0:
                    page = int(layer.req_to_token[row, block * size]) // size
                    keys = before.blocks[row, head, selected + block % shape.local, 0]
                    before.host_summaries[page, head] = summarise(keys, fmt)
                    if block == int(step.table.completed[i]):
                        before.summaries[row, head, block] = summarise(keys, fmt)
    assert_same_bits(after.memory(), before.memory())


@few
@given(shape=SHAPES, smoothed=st.booleans(), sinks=st.integers(0, 2), seed=SEEDS)
def test_scores_are_those_of_the_selector_then_smoothed_then_with_the_sinks_first(
    shape: Shape, smoothed: bool, sinks: int, seed: int
) -> None:
    rng = generator(seed)
    layer = make_layer(shape, INT4, rng)
    counts = torch.tensor([9, 5])
    fill_summaries(layer, counts, INT4, rng)
    rows = torch.tensor([2, 1, 0])
    queries = torch.randn((3, 2, shape.heads * 2, shape.head_dim), generator=rng)
    averages = torch.rand((shape.rows, shape.heads, shape.logical), generator=rng) if smoothed else None
    expected_averages = None if averages is None else averages.clone()
    candidates = torch.tensor([5, 9, 0])
    expected = torch.full((3, shape.heads, shape.logical), float("-inf"))
    live = slice(0, 2)
    found = block_scores.reference(
        queries[live], layer.summaries[rows[live]], INT4, candidates[live], 0.2, 0.6
    )  # fmt: skip
    if expected_averages is not None:
        smooth_scores.reference(expected_averages, rows[live], found, candidates[live], 0.8)
    found[..., :sinks] = float("inf")
    expected[live] = found
    ranking = Ranking(INT4, 0.2, 0.6, 0.8, sinks)
    got = score_blocks.reference(queries, layer.summaries, Among(rows, candidates.int()), ranking, averages)
    torch.testing.assert_close(got, expected)
    torch.testing.assert_close(averages, expected_averages)


@few
@given(
    heads=st.integers(1, 3),
    selected=st.integers(1, 6),
    most=st.integers(1, 6),
    cap=st.integers(1, 7),
    seed=SEEDS,
)
def test_admissions_are_those_of_select_blocks(heads: int, selected: int, most: int, cap: int, seed: int) -> None:
    rng = generator(seed)
    logical, most = 11, min(most, selected)
    maps = occupied_maps(4, heads, selected, logical, rng)
    rows = entries(3, 0, rng)
    counts = torch.randint(selected, logical + 1, (3,), generator=rng)
    scores = torch.rand((3, heads, logical), generator=rng)
    scores.masked_fill_(torch.arange(logical) >= counts[:, None, None], float("-inf"))
    predicted = scores.topk(selected, dim=-1).indices
    ages = maps.last_selected.clone()
    admissions, counters = empty_admissions(3, heads, most), torch.tensor([1, 2])
    number, limit = torch.tensor([[4], [cap]], dtype=torch.int32)
    admitting = Admitting(limit, admissions, counters)
    select_admissions.reference(predicted, Among(rows, counts.int()), maps, Mark(number, 1), admitting)
    marked = maps.last_selected.clone()
    maps.last_selected.copy_(ages)
    expected = select_blocks.reference(scores, counts, rows, maps, 9, min(cap, most))
    width = expected.blocks.shape[-1]
    assert torch.equal(admissions.blocks[..., :width], expected.blocks)
    assert torch.equal(admissions.slots[..., :width], expected.slots)
    assert (admissions.blocks[..., width:] == -1).all()
    assert (admissions.slots[..., width:] == -1).all()
    assert counters.tolist() == [1 + expected.admitted, 2 + expected.deferred]
    assert torch.equal(marked, maps.last_selected)


def test_an_entry_without_candidates_admits_and_marks_nothing() -> None:
    maps = occupied_maps(2, 1, 3, 5, generator(0))
    ages = maps.last_selected.clone()
    admissions, counters = empty_admissions(1, 1, 2), torch.zeros(2, dtype=torch.int64)
    one, none = torch.ones(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    predicted, rows = torch.tensor([[[0, 1, 2]]]), torch.tensor([1])
    admitting = Admitting(one, admissions, counters)
    select_admissions.reference(predicted, Among(rows, none), maps, Mark(one, 0), admitting)
    assert all((tensor == -1).all() for tensor in admissions)
    assert not counters.any()
    assert torch.equal(maps.last_selected, ages)


@few
@given(shape=SHAPES, seed=SEEDS)
def test_fetched_blocks_are_those_of_admit_blocks(shape: Shape, seed: int) -> None:
    rng = generator(seed)
    layer = make_layer(shape, INT4, rng)
    layer.host_kv.copy_(torch.randn(layer.host_kv.shape, generator=rng))
    rows = torch.tensor([2, 1])
    blocks, slots = torch.full((2, 2, shape.heads, 2), -1, dtype=torch.int32)
    for i, row in enumerate(rows.tolist()):
        for head in range(shape.heads):
            blocks[i, head] = (layer.maps.slot_of[row, head] < 0).nonzero().flatten()[:2].int()
            slots[i, head] = torch.randperm(shape.selected, generator=rng)[:2].int()
    blocks[0, 0, 1] = slots[0, 0, 1] = -1
    pages = layer.req_to_token[rows, :: shape.block_size] // shape.block_size
    expected = layer.copy()
    admit_blocks.reference(
        expected.blocks, expected.maps, layer.host_kv, pages, rows, Admissions(blocks, slots, 0), 15
    )  # fmt: skip
    number = torch.tensor([7], dtype=torch.int32)
    fetch_blocks.reference(layer.state, rows, DeviceAdmissions(blocks, slots), Mark(number, 1))
    assert_same_bits(layer.memory(), expected.memory())


def test_attend_is_paged_attention() -> None:
    rng = generator(1)
    blocks = torch.randn((3, 2, 4, 2, 8, 16), generator=rng)
    query = torch.randn((3, 4, 16), generator=rng)
    tables = (torch.tensor([2, 1]), torch.tensor([[1, 0], [3, 2]]).int(), torch.tensor([9, 12]).int())
    starts = torch.tensor([0, 1, 3]).int()
    expected = paged_attention.reference(query, blocks, *tables, starts, 0.3)
    torch.testing.assert_close(attend.reference(query, blocks, *tables, starts, 0.3, 2), expected)


@FORMATS
def test_blocks_are_summarised_from_one_place_to_another_unless_their_source_is_negative(fmt: SummaryFormat) -> None:
    kv = torch.randn(4, 2, 2, 8, 16)
    expected, got = torch.full((2, 6, 2, fmt.record_bytes(16)), 77, dtype=torch.uint8)
    mirrored = torch.zeros(4, 2, fmt.record_bytes(16), dtype=torch.uint8)
    summarise_pages.reference(kv, torch.arange(4), fmt, mirrored)
    expected[5], expected[0] = mirrored[1], mirrored[3]
    summarise_blocks.reference(kv, torch.tensor([1, -1, 3]), got, torch.tensor([5, 2, 0]), fmt)
    assert torch.equal(got, expected)


def test_kernels_that_are_not_installed_are_missed_in_a_sentence(
    monkeypatch: pytest.MonkeyPatch, tmp_path: str
) -> None:
    monkeypatch.delitem(sources.sys.modules, sources.NAME, raising=False)
    monkeypatch.setattr(sources, "source_folder", lambda: sources.Path(tmp_path))
    with pytest.raises(ImportError, match=r"^The Triton kernels are not in .*: install sglang-oasis again\.$"):
        sources.load()
