"""Summaries, selectors and capped eviction against plain loops; the kernels equal them in test_cpu_kernels.py."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sglang_oasis.errors import LookaheadKVError
from sglang_oasis.lookahead.selectors import SELECTORS, BoundSelector, rank_blocks
from sglang_oasis.ops.dispatch import device_op
from sglang_oasis.ops.eviction import Admissions, Maps, admit_blocks, graduate_blocks, select_blocks
from sglang_oasis.ops.summary import (
    SUMMARY_FORMATS,
    SummaryFormat,
    block_scores,
    pack,
    summarise,
    summarise_pages,
    unpack,
)

BF16 = SUMMARY_FORMATS["bf16"]
FORMATS = pytest.mark.parametrize("fmt", SUMMARY_FORMATS.values(), ids=SUMMARY_FORMATS)


def test_a_summary_is_midpoint_and_half_range_per_coordinate() -> None:
    keys = torch.tensor([[[1.0, -4.0], [3.0, 2.0], [-2.0, 0.5]]])
    assert unpack(summarise(keys, BF16), BF16).tolist() == [[[0.5, -1.0], [2.5, 3.0]]]


@FORMATS
def test_a_record_has_the_bytes_it_says(fmt: SummaryFormat) -> None:
    assert summarise(torch.randn(3, 5, 8, 32), fmt).shape == (3, 5, fmt.record_bytes(32))
    assert [SUMMARY_FORMATS[name].record_bytes(128) for name in ("bf16", "int8", "int4")] == [512, 260, 132]


@pytest.mark.parametrize(("name", "steps"), [("int8", (127, 255)), ("int4", (7, 15))])
@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 9999), magnitude=st.sampled_from([0.0, 1e-30, 1e-3, 1.0, 1e4]))
def test_codes_are_within_half_a_step_and_the_largest_coordinate_uses_the_last_code(
    name: str, steps: tuple[int, int], seed: int, magnitude: float
) -> None:
    rng = torch.Generator().manual_seed(seed)
    vectors = torch.randn((4, 2, 16), generator=rng) * magnitude
    vectors[:, 1].abs_()
    fmt = SUMMARY_FORMATS[name]
    got = unpack(pack(vectors, fmt), fmt)
    for half, largest in enumerate(steps):
        step = vectors[:, half].abs().amax(-1, keepdim=True) / largest
        # Half a step from rounding the code; the scale is a bfloat16, which moves every code's value by 2^-8.
        bound = step * 0.505 + vectors[:, half].abs() * 2**-8 + 1e-45
        assert ((got[:, half] - vectors[:, half]).abs() <= bound).all()
        assert (got[:, half].abs().amax(-1) >= vectors[:, half].abs().amax(-1) * (1 - 2**-7)).all()


def test_a_byte_holds_coordinate_d_below_and_coordinate_d_plus_half_above() -> None:
    vectors = torch.zeros(2, 8)
    vectors[0] = torch.tensor([7.0, -7, 1, -1, 3, -3, 0, 5])
    vectors[1] = torch.tensor([15.0, 0, 1, 2, 3, 4, 5, 6])
    record = pack(vectors, SUMMARY_FORMATS["int4"])
    signed = [0x37, 0xD9, 0x01, 0x5F]
    assert record[:8].tolist() == [*signed, 0x3F, 0x40, 0x51, 0x62]
    assert record[8:].view(torch.bfloat16).tolist() == [1.0, 1.0]


@FORMATS
def test_only_the_given_pages_are_summarised_from_their_keys(fmt: SummaryFormat) -> None:
    host_kv = torch.randn(6, 2, 2, 4, 8)
    records = torch.full((6, 2, fmt.record_bytes(8)), 77, dtype=torch.uint8)
    summarise_pages.reference(host_kv, torch.tensor([4, 1]), fmt, records)
    for page in range(6):
        expected = summarise(host_kv[page, :, 0], fmt) if page in (1, 4) else torch.full_like(records[page], 77)
        assert torch.equal(records[page], expected)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 9999))
def test_no_key_of_a_block_scores_above_its_bound(seed: int) -> None:
    """Tightness 1 is a bound; block_scores returns softmaxes, whose logarithms differ from the bounds by a constant."""
    rng = torch.Generator().manual_seed(seed)
    keys = torch.randn((5, 4, 8), generator=rng)
    query = torch.randn((1, 1, 1, 8), generator=rng)
    records = summarise(keys, BF16)[None, None]
    scores = block_scores.reference(query, records, BF16, torch.tensor([5]), 1.0, 1.0)[0, 0]
    midpoint, half_range = unpack(records[0, 0], BF16).unbind(1)
    bounds = midpoint @ query[0, 0, 0] + half_range @ query[0, 0, 0].abs()
    torch.testing.assert_close(scores, torch.softmax(bounds, 0))
    exact = (keys @ query[0, 0, 0]).amax(-1)
    assert (bounds >= exact - 2**-8 * query.abs().sum() * keys.abs().max()).all()


@FORMATS
@pytest.mark.parametrize("tightness", [0.0, 0.5, 1.0])
def test_scores_average_softmaxes_over_the_group_and_the_queries(fmt: SummaryFormat, tightness: float) -> None:
    rng = torch.Generator().manual_seed(3)
    n, num_queries, heads, group, dim, blocks = 2, 3, 2, 2, 4, 6
    queries = torch.randn((n, num_queries, heads * group, dim), generator=rng)
    records = summarise(torch.randn((n, heads, blocks, 5, dim), generator=rng), fmt)
    candidates = torch.tensor([6, 4])
    scores = block_scores.reference(queries, records, fmt, candidates, 0.7, tightness)
    assert torch.equal(scores, BoundSelector(tightness)(queries, records, fmt, candidates, 0.7))
    for i in range(n):
        for head in range(heads):
            midpoint, half_range = unpack(records[i, head, : candidates[i]], fmt).double().unbind(1)
            expected = torch.zeros(int(candidates[i]), dtype=torch.float64)
            for q in range(num_queries):
                for g in range(group):
                    query = queries[i, q, head * group + g].double()
                    estimate = (midpoint * query).sum(-1) + tightness * (half_range * query.abs()).sum(-1)
                    expected += torch.softmax(estimate * 0.7, 0) / (num_queries * group)
            torch.testing.assert_close(scores[i, head, : candidates[i]], expected.float())
            assert (scores[i, head, candidates[i] :] == float("-inf")).all()


def test_sinks_rank_above_every_block() -> None:
    def flat(queries: Tensor, records: Tensor, fmt: SummaryFormat, candidates: Tensor, scale: float) -> Tensor:
        return torch.tensor([[[0.1, 0.2, 0.3, 0.4]]])

    scores = rank_blocks(flat, torch.empty(0), torch.empty(0), BF16, torch.tensor([4]), 1.0, 2)
    torch.testing.assert_close(scores, torch.tensor([[[float("inf"), float("inf"), 0.3, 0.4]]]))


def test_an_unknown_selector_is_refused_with_the_known_ones() -> None:
    for name in ("best", None, ["minmax"]):
        with pytest.raises(LookaheadKVError, match=r"must be one of .*minmax, got"):
            SELECTORS.find(name)


def maps_of(resident: list[int], ages: list[int], blocks: int) -> Maps:
    """One row and head."""
    slot_of = torch.full((1, 1, blocks), -1, dtype=torch.int32)
    slot_of[0, 0, torch.tensor(resident)] = torch.arange(len(resident), dtype=torch.int32)
    return Maps(torch.tensor([[resident]]).int(), torch.tensor([[ages]]).int(), slot_of)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_select_blocks_equals_algorithm_2_on_sets(data: st.DataObject) -> None:
    budget, blocks = 4, 9
    cap = data.draw(st.integers(1, budget + 1))
    candidates = data.draw(st.integers(budget, blocks))
    resident = data.draw(st.permutations(range(blocks)))[:budget]
    scores = data.draw(st.lists(st.integers(0, 4), min_size=candidates, max_size=candidates))
    ages = data.draw(st.lists(st.integers(0, 5), min_size=budget, max_size=budget))
    maps = maps_of(list(resident), ages, blocks)
    padded = torch.tensor([[[*map(float, scores), *[float("-inf")] * (blocks - candidates)]]])
    before = Maps(*(m.clone() for m in maps))
    admissions = select_blocks.reference(padded, torch.tensor([candidates]), torch.tensor([0]), maps, 9, cap)

    predicted = sorted(range(candidates), key=lambda block: (-scores[block], block))[:budget]
    missing = [block for block in predicted if block not in resident]
    pool = sorted((ages[slot], slot) for slot, block in enumerate(resident) if block not in predicted)
    admitted = min(cap, len(missing))
    padding = [-1] * (min(cap, budget) - admitted)
    assert admissions.blocks[0, 0].tolist() == missing[:admitted] + padding
    assert admissions.slots[0, 0].tolist() == [slot for _, slot in pool[:admitted]] + padding
    assert (admissions.admitted, admissions.deferred) == (admitted, len(missing) - admitted)
    marked = [9 if b in predicted else a for b, a in zip(resident, ages, strict=True)]
    assert maps.last_selected[0, 0].tolist() == marked
    assert torch.equal(maps.head_map, before.head_map)
    assert torch.equal(maps.slot_of, before.slot_of)


def test_admitted_blocks_replace_what_their_slots_held() -> None:
    maps = maps_of([3, 1, 0], [2, 2, 2], 6)
    blocks, host_kv = torch.zeros(1, 1, 4, 2, 2, 4), torch.randn(8, 1, 2, 2, 4)
    pages = torch.tensor([[0, 1, 2, 3, 7, 5]]).int()
    admissions = Admissions(torch.tensor([[[4, -1]]]).int(), torch.tensor([[[1, -1]]]).int(), 0)
    admit_blocks.reference(blocks, maps, host_kv, pages, torch.tensor([0]), admissions, 5)
    assert torch.equal(blocks[0, 0, 1], host_kv[7, 0])
    assert not blocks[0, 0, [0, 2, 3]].any()
    assert maps.head_map.tolist() == [[[3, 4, 0]]]
    assert maps.last_selected.tolist() == [[[2, 5, 2]]]
    assert maps.slot_of.tolist() == [[[2, -1, -1, 0, 1, -1]]]


def test_a_block_that_leaves_the_local_slots_stays_while_there_is_a_slot_for_it() -> None:
    maps = maps_of([0, 1], [1, 1], 4)
    maps.head_map[0, 0, 1] = maps.slot_of[0, 0, 1] = -1
    blocks = torch.arange(4.0).view(1, 1, 4, 1, 1, 1).expand(1, 1, 4, 2, 2, 4).clone()
    rows, graduates, local_slots = torch.tensor([0, 0]), torch.tensor([1, 2]), torch.tensor([3, 2])
    graduate_blocks.reference(blocks, maps, rows, graduates, local_slots, 7)
    assert blocks[0, 0, :, 0, 0, 0].tolist() == [0, 3, 2, 3]
    assert maps.head_map.tolist() == [[[0, 1]]]
    assert maps.last_selected.tolist() == [[[1, 7]]]
    assert maps.slot_of.tolist() == [[[0, 1, -1, -1]]]


def test_a_device_may_override_an_op_and_decline_a_call() -> None:
    @device_op
    def double(x: Tensor) -> Tensor:
        return 2 * x

    assert double(torch.ones(1)).item() == 2
    double.register("cpu")(lambda x: 3 * x if x.numel() == 1 else NotImplemented)
    assert double(torch.ones(1)).item() == 3
    assert double(torch.ones(2)).tolist() == [2, 2]
    assert double.reference(torch.ones(1)).item() == 2
