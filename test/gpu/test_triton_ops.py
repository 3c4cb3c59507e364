"""Every Triton kernel against its reference; the unit tests' cases in shapes that compile once."""

from __future__ import annotations

import pytest
import torch

from sglang_oasis.kernels.triton import launches
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
from test.cases.device_step_cases import Shape
from test.cases.kernel_cases import FORMATS
from test.cases.places import Place

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32

SHAPES = pytest.mark.parametrize(
    "shape",
    [
        Shape(3, 2, 6, 2, 16, 128, 13, BF16),
        Shape(3, 1, 5, 3, 8, 80, 13, FP16),
        Shape(3, 2, 4, 2, 32, 64, 13, FP32),
    ],
    ids=["bf16-16x128", "fp16-8x80", "fp32-32x64"],
)


@pytest.fixture(params=["small tiles", "tiles of the product"])
def tiles(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "small tiles":
        for name, size in SMALL_TILES.items():
            monkeypatch.setattr(launches, name, size)
    elif request.config.getoption("--tiny"):
        pytest.skip("a rehearsal has small tiles only")


@FORMATS
@SHAPES
@pytest.mark.parametrize(("tokens", "first"), [(1, 0), (3, 1)])
def test_tokens_are_taken_into_both_tiers(
    place: Place, fmt: SummaryFormat, shape: Shape, tokens: int, first: int, seed: int
) -> None:
    other = FP32 if shape.dtype == BF16 else BF16
    check_take_tokens(place, fmt, shape, tokens, first, seed % 3, (shape.dtype, other)[seed % 2], shape.dtype, seed)


@FORMATS
@SHAPES
@pytest.mark.usefixtures("tiles")
def test_scores_rank_the_candidates_and_read_nothing_else(
    place: Place, fmt: SummaryFormat, shape: Shape, seed: int
) -> None:
    check_score_blocks(place, fmt, shape, 4, 1 + 2 * (seed % 2), shape.dtype, seed < 3, seed % 3, 0.6, seed)


@pytest.mark.parametrize(("heads", "selected", "most"), [(2, 6, 3), (3, 9, 9), (1, 1, 1)])
def test_admissions_are_those_of_algorithm_2(place: Place, heads: int, selected: int, most: int, seed: int) -> None:
    for case in range(4):
        check_select_admissions(place, heads, selected, most, 1 + 2 * case, case % 3, seed % 2 == 1, 4 * seed + case)


@SHAPES
@pytest.mark.usefixtures("tiles")
def test_admitted_blocks_are_fetched_bit_for_bit(place: Place, shape: Shape, seed: int) -> None:
    check_fetch_blocks(place, shape, FP32 if seed == 3 else shape.dtype, seed % 3, seed % 2 == 1, seed)


@pytest.mark.parametrize("paged", [False, True], ids=["resident", "pages"])
@pytest.mark.parametrize(
    ("group", "size", "dim", "dtype"), [(4, 16, 128, BF16), (5, 8, 80, FP16), (2, 32, 64, FP32), (8, 16, 256, BF16)]
)
def test_attention_is_exact_and_causal(
    place: Place, paged: bool, group: int, size: int, dim: int, dtype: torch.dtype, seed: int
) -> None:
    tokens = ([1, 1, 1], [4, 2, 4], [0, 3], [2])[seed]
    check_attend(place, paged, tokens, 2, group, size, dim, dtype, FP32 if seed == 3 else dtype, seed)


@FORMATS
@SHAPES
def test_summaries_are_those_of_the_reference_byte_for_byte(
    place: Place, fmt: SummaryFormat, shape: Shape, seed: int
) -> None:
    magnitude = (1.0, 0.0, 1e-30, 1e4)[seed]
    check_summarise_blocks(place, fmt, shape.heads, shape.block_size, shape.head_dim, shape.dtype, magnitude, seed)
