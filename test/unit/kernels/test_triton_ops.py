"""The Triton kernels, run by Triton's interpreter, against the references of the ops."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_oasis.kernels.triton import launches, overrides
from sglang_oasis.ops.device_step import Admitting, Among, Mark
from sglang_oasis.ops.summary import SummaryFormat
from test.cases.device_op_checks import (
    SMALL_TILES,
    check_attend,
    check_fetch_blocks,
    check_score_blocks,
    check_select_admissions,
    check_summarise_blocks,
    check_take_tokens,
)
from test.cases.device_step_cases import SHAPES, Shape, empty_admissions, few
from test.cases.kernel_cases import BLOCK_SIZES, DTYPES, FORMATS, SEEDS, generator, occupied_maps
from test.cases.places import CPU

HEAD_DIMS = st.sampled_from([16, 64, 80, 96, 128])


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that small cases have several of them."""
    for name, size in SMALL_TILES.items():
        monkeypatch.setattr(launches, name, size)


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
    check_take_tokens(CPU, fmt, shape, tokens, first, padding, key_dtype, host_dtype, seed)


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
    check_score_blocks(CPU, fmt, shape, group, num_queries, query_dtype, smoothed, sinks, tightness, seed)


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
    check_select_admissions(CPU, heads, selected, most, cap, padding, emptied, seed)


@few
@given(shape=SHAPES, host_dtype=DTYPES, padding=st.integers(0, 2), emptied=st.booleans(), seed=SEEDS)
def test_admitted_blocks_are_fetched_bit_for_bit(
    shape: Shape, host_dtype: torch.dtype, padding: int, emptied: bool, seed: int
) -> None:
    check_fetch_blocks(CPU, shape, host_dtype, padding, emptied, seed)


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
    check_attend(CPU, paged, tokens, heads, group, size, dim, dtype, kv_dtype, seed)


@FORMATS
@few
@given(
    heads=st.integers(1, 2), size=BLOCK_SIZES, dim=HEAD_DIMS, dtype=DTYPES,
    magnitude=st.sampled_from([0.0, 1e-30, 1.0, 1e4]), seed=SEEDS,
)  # fmt: skip
def test_summaries_are_those_of_the_reference_byte_for_byte(
    fmt: SummaryFormat, heads: int, size: int, dim: int, dtype: torch.dtype, magnitude: float, seed: int
) -> None:
    check_summarise_blocks(CPU, fmt, heads, size, dim, dtype, magnitude, seed)


def test_a_head_size_that_the_kernels_do_not_know_is_left_to_the_reference() -> None:
    query = torch.zeros(1, 1, 40)
    rows = starts = torch.zeros(1, dtype=torch.int64)
    blocks = torch.zeros(1, 1, 2, 8, 40)
    assert overrides.attend(query, blocks, rows, rows[None], rows, starts, 1.0, 1) is NotImplemented


def test_a_tensor_with_gaps_is_refused_by_name() -> None:
    blocks = torch.zeros(2, 1, 4, 2, 8, 16)[:, :, ::2]
    zeros = torch.zeros(1, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"^blocks must be contiguous, got strides .*\.$"):
        overrides.attend(torch.zeros(1, 1, 16), blocks, zeros, zeros[None].int(), zeros.int(), zeros.int(), 1.0, 1)


def test_admissions_wider_than_the_slots_are_refused() -> None:
    maps = occupied_maps(1, 1, 2, 4, generator(0))
    one, zeros = torch.ones(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int64)
    with pytest.raises(ValueError, match="at most as wide as the 2 selected slots, got 3"):
        overrides.select_admissions(
            torch.zeros(1, 1, 2, dtype=torch.int64),
            Among(zeros, one),
            maps,
            Mark(one, 0),
            Admitting(one, empty_admissions(1, 1, 3), zeros),
        )
