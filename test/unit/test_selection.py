"""Summaries, selectors and capped eviction against plain loops."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_oasis.errors import LookaheadKVError
from sglang_oasis.lookahead.selector import find_selector, minmax
from sglang_oasis.ops.dispatch import device_op
from sglang_oasis.ops.eviction import capped_eviction
from sglang_oasis.ops.summary import block_bounds, bound_scores


def test_bounds_are_minimum_and_maximum_per_coordinate() -> None:
    keys = torch.tensor([[[1.0, -4.0], [3.0, 2.0], [-2.0, 0.5]]])
    assert block_bounds(keys).tolist() == [[[-2.0, -4.0], [3.0, 2.0]]]


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 9999))
def test_no_key_of_a_block_scores_above_its_bound(seed: int) -> None:
    rng = torch.Generator().manual_seed(seed)
    keys = torch.randn((5, 4, 8), generator=rng).bfloat16().float()
    query = torch.randn((3, 8), generator=rng)
    bounds = bound_scores(query[None, None], block_bounds(keys)[None, None])[0, 0]
    exact = torch.einsum("md,nbd->mnb", query, keys).amax(-1)
    assert (bounds >= exact - 1e-4).all()


def test_minmax_averages_softmaxes_over_the_group_and_the_queries() -> None:
    rng = torch.Generator().manual_seed(3)
    n, num_queries, heads, group, dim, blocks = 2, 3, 2, 2, 4, 6
    queries = torch.randn((n, num_queries, heads * group, dim), generator=rng)
    summaries = block_bounds(torch.randn((n, heads, blocks, 5, dim), generator=rng))
    candidates = torch.tensor([6, 4])
    scores = minmax(queries, summaries, candidates, 0.7)
    for i in range(n):
        for head in range(heads):
            low, high = summaries[i, head, : candidates[i]].float().unbind(1)
            expected = torch.zeros(int(candidates[i]))
            for q in range(num_queries):
                for g in range(group):
                    query = queries[i, q, head * group + g]
                    bound = torch.maximum(query * low, query * high).sum(-1) * 0.7
                    expected += torch.softmax(bound, 0) / (num_queries * group)
            torch.testing.assert_close(scores[i, head, : candidates[i]], expected)
            assert (scores[i, head, candidates[i] :] == float("-inf")).all()


def test_an_unknown_selector_is_refused_with_the_known_ones() -> None:
    for name in ("best", None, ["minmax"]):
        with pytest.raises(LookaheadKVError, match=r"use one of .*minmax"):
            find_selector(name)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_capped_eviction_equals_algorithm_2_on_sets(data: st.DataObject) -> None:
    budget, blocks = 4, 9
    cap = data.draw(st.integers(1, budget))
    resident = data.draw(st.permutations(range(blocks)))[:budget]
    predicted = data.draw(st.permutations(range(blocks)))[:budget]
    ages = data.draw(st.lists(st.integers(0, 5), min_size=budget, max_size=budget))
    slot_of = torch.full((1, 1, blocks), -1, dtype=torch.int32)
    for slot, block in enumerate(resident):
        slot_of[0, 0, block] = slot
    last_selected = torch.tensor([[ages]], dtype=torch.int32)
    admissions = capped_eviction(torch.tensor([[predicted]]), slot_of, last_selected, 9, cap)

    missing = [block for block in predicted if block not in resident]
    pool = sorted((ages[slot], slot) for slot, block in enumerate(resident) if block not in predicted)
    assert admissions.block.tolist() == missing[:cap]
    assert admissions.slot.tolist() == [slot for _, slot in pool[: len(missing[:cap])]]
    assert admissions.deferred == len(missing) - len(missing[:cap])
    assert last_selected[0, 0].tolist() == [9 if b in predicted else a for b, a in zip(resident, ages, strict=True)]


def test_a_device_may_override_an_op() -> None:
    @device_op
    def double(x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    assert double(torch.ones(1)).item() == 2
    double.register("cpu")(lambda x: 3 * x)
    assert double(torch.ones(1)).item() == 3
    assert double.reference(torch.ones(1)).item() == 2
