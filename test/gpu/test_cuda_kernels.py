"""The CUDA C++ kernels against their references: the unit tests' cases, built for the GPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from sglang_oasis.ops.summary import SummaryFormat
from test.cases.kernel_cases import FORMATS
from test.cases.places import Place

pytest.importorskip("tvm_ffi")

from sglang_oasis.kernels.cuda import native
from test.cases.cuda_kernel_cases import (
    Selection,
    assert_selects_like_reference,
    check_fetch_blocks,
    check_float32_queries,
    ordinary_selection,
    random_selection,
)

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@pytest.fixture(scope="module", autouse=True)
def kernels(place: Place) -> Iterator[None]:
    if place.device.type == "cpu":
        from test.cases.cuda_emulation import emulated

        with emulated():
            yield
        return
    try:
        native.build()
    except RuntimeError as error:
        if "there is no CUDA toolkit" not in str(error):
            raise
        pytest.skip(str(error))
    assert native.load() is not None
    yield


def random_case(place: Place, fmt: SummaryFormat, seed: int, *, ties: bool) -> Selection:
    head_dim, dtype = ((128, BF16), (64, FP16), (80, FP32), (256, BF16))[seed]
    case = random_selection(
        seed, fmt, kv_heads=2, group=(4, 1, 3, 5)[seed], num_queries=(1, 3, 2, 5)[seed], head_dim=head_dim,
        selected=(16, 20, 5, 1)[seed], logical=170, live=3, padding=seed % 3, dtype=dtype, smoothed=seed != 1,
        ties=ties, sinks=seed % 2, cap=(4, 20, 1, 2)[seed], width=(5, 16, 5, 1)[seed], offset=seed % 2,
    )  # fmt: skip
    case.place = place
    return case


@FORMATS
@pytest.mark.parametrize("ties", [False, True], ids=["distinct", "ties"])
def test_the_kernel_selects_what_its_scores_select(place: Place, fmt: SummaryFormat, ties: bool, seed: int) -> None:
    case = random_case(place, fmt, seed, ties=ties)
    scores = case.scores_of_kernel()
    torch.testing.assert_close(scores, case.scores_of_reference(), rtol=2e-4, atol=1e-8)
    assert_selects_like_reference(case, scores)


@FORMATS
@pytest.mark.parametrize("copies", [1, 8], ids=["logits fit", "logits do not fit"])
def test_a_long_row_selects_like_the_reference(
    place: Place, fmt: SummaryFormat, copies: int, request: pytest.FixtureRequest
) -> None:
    """Of 2048 blocks, with 4 query vectors per head, or with 32, whose logits take 256 KiB."""
    case = ordinary_selection(200 if request.config.getoption("--tiny") else 2048, fmt=fmt.name)
    case.place, case.queries = place, case.queries.repeat(1, copies, 1, 1)
    scores = case.scores_of_kernel()
    torch.testing.assert_close(scores, case.scores_of_reference(), rtol=2e-4, atol=1e-8)
    assert_selects_like_reference(case, scores)


@pytest.mark.parametrize(("dtype", "dim", "size"), [(BF16, 128, 16), (FP16, 80, 8), (FP32, 256, 32), (BF16, 16, 8)])
def test_admitted_blocks_are_loaded_and_replace_others_in_the_maps(
    place: Place, dtype: torch.dtype, dim: int, size: int, seed: int
) -> None:
    check_fetch_blocks(place, 1 + seed % 3, 6, 4, dtype, dim, size, (16, 1, 2, 3)[seed], seed)


@FORMATS
def test_float32_queries_keep_all_their_bits(place: Place, fmt: SummaryFormat) -> None:
    check_float32_queries(place, fmt)
