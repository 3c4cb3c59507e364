"""The CUDA C++ kernels, run on the CPU by test/cuda_on_cpu, do what their plain-torch references do."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from scripts.kernel_reports.cuda_report import ARCHITECTURES, fetch_traffic, kernel_costs, select_traffic
from sglang_oasis.kernels import compiled
from sglang_oasis.kernels.cuda import native, overrides
from sglang_oasis.ops.device_step import Admitting, Among, DeviceAdmissions, LayerState, Mark, Ranking
from sglang_oasis.ops.summary import SUMMARY_FORMATS, SummaryFormat
from test.cases.cuda_emulation import emulated
from test.cases.cuda_kernel_cases import (
    Selection,
    assert_selects_like_reference,
    check_fetch_blocks,
    check_float32_queries,
    ordinary_selection,
    random_selection,
)
from test.cases.kernel_cases import (
    BLOCK_SIZES,
    DTYPES,
    EXAMPLES,
    FORMATS,
    HEAD_DIMS,
    SCALED_TOLERANCES,
    SEEDS,
    generator,
    occupied_maps,
)
from test.cases.places import CPU

some = settings(max_examples=max(1, EXAMPLES // 4), deadline=None, suppress_health_check=list(HealthCheck))


@pytest.fixture(scope="module", autouse=True)
def on_cpu() -> Iterator[Any]:
    with emulated() as module:
        yield module


@st.composite
def selections(draw: st.DrawFn, fmt: SummaryFormat, ties: bool = False) -> Selection:
    """Three rows besides the one for padding, of which some decode, in any order."""
    selected = draw(st.integers(1, 20))
    case = random_selection(
        draw(SEEDS),
        fmt,
        kv_heads=draw(st.integers(1, 2)),
        group=draw(st.integers(1, 5)),
        num_queries=draw(st.sampled_from([1, 1, 2, 5])),
        head_dim=draw(HEAD_DIMS),
        selected=selected,
        logical=selected + draw(st.integers(1, 150)),
        live=draw(st.integers(1, 3)),
        padding=draw(st.integers(0, 2)),
        dtype=draw(DTYPES),
        smoothed=draw(st.booleans()),
        ties=ties,
        decay=draw(st.sampled_from([0.0, 0.8])),
        sinks=draw(st.integers(0, min(2, selected))),
        cap=draw(st.integers(1, selected + 1)),
        width=draw(st.integers(1, selected)),
        offset=draw(st.integers(0, 1)),
    )
    assume(native.fits(case.queries, case.maps, fmt))
    vectors = case.queries.shape[1] * case.queries.shape[2] // case.shape[1]
    least = native.kernels().shared_bytes_without_logits(case.queries, fmt.bits, case.shape[1], selected)
    room = draw(st.sampled_from([None, 0, 40]))  # blocks whose logits fit
    case.shared_bytes = 0 if room is None else least + room * vectors * 4
    return case


@FORMATS
@some
@given(data=st.data())
def test_blocks_score_as_by_the_references(fmt: SummaryFormat, data: st.DataObject) -> None:
    case = data.draw(selections(fmt))
    tolerance = 1e-4 if case.fmt.scaling is None else SCALED_TOLERANCES[case.queries.dtype]
    torch.testing.assert_close(case.scores_of_kernel(), case.scores_of_reference(), rtol=tolerance, atol=1e-9)


@FORMATS
@some
@given(data=st.data())
def test_the_best_missing_blocks_replace_the_oldest_of_the_others(fmt: SummaryFormat, data: st.DataObject) -> None:
    case = data.draw(selections(fmt))
    assert_selects_like_reference(case, case.scores_of_kernel())


@some
@given(data=st.data(), fmt=st.sampled_from(list(SUMMARY_FORMATS.values())))
def test_equal_summaries_score_equally_and_rank_in_the_order_of_the_blocks(
    data: st.DataObject, fmt: SummaryFormat
) -> None:
    case = data.draw(selections(fmt, ties=True))
    scores = case.scores_of_kernel()
    for entry, candidates in zip(scores, case.candidates.tolist(), strict=True):
        for head in entry:
            assert len(set(head[:candidates].tolist())) <= 4
    assert_selects_like_reference(case, scores)


@FORMATS
def test_float32_queries_keep_all_their_bits(fmt: SummaryFormat) -> None:
    check_float32_queries(CPU, fmt)


@FORMATS
def test_a_long_row_selects_like_the_reference(fmt: SummaryFormat) -> None:
    case = ordinary_selection(2048, fmt=fmt.name)
    scores = case.scores_of_kernel()
    torch.testing.assert_close(scores, case.scores_of_reference(), rtol=1e-4, atol=1e-9)
    assert_selects_like_reference(case, scores)


@pytest.mark.parametrize("rereads", [False, True], ids=["logits fit", "logits do not fit"])
def test_summaries_are_read_once_and_twice_where_the_logits_do_not_fit(on_cpu: Any, rereads: bool) -> None:
    case = ordinary_selection(2048)
    if rereads:
        least = on_cpu.shared_bytes_without_logits(case.queries, case.fmt.bits, 2, 128)
        case.shared_bytes = least + 1024
    before = on_cpu.bytes_read()
    case.run()
    assert on_cpu.bytes_read() - before == (2 if rereads else 1) * case.summaries[1].numel()


def test_padding_entries_that_name_the_dummy_row_at_once_do_no_harm() -> None:
    case = ordinary_selection(200, selected=8)
    case.rows, case.candidates = torch.tensor([0, 1, 0, 0]), torch.tensor([150, 200, 0, 1], dtype=torch.int32)
    case.queries = case.queries.expand(4, -1, -1, -1).contiguous()
    alone = ordinary_selection(200, selected=8)
    expected = alone.run()
    for got, wanted in zip(case.run(), expected, strict=True):
        assert torch.equal(got[1:2], wanted)
    assert torch.equal(case.maps.last_selected[1], alone.maps.last_selected[1])


@some
@given(
    kv_heads=st.integers(1, 3), selected=st.integers(1, 6), width=st.integers(1, 8), dtype=DTYPES, head_dim=HEAD_DIMS,
    block_size=BLOCK_SIZES, thread_blocks=st.integers(1, 4), seed=SEEDS,
)  # fmt: skip
def test_admitted_blocks_are_loaded_and_replace_others_in_the_maps(
    kv_heads: int,
    selected: int,
    width: int,
    dtype: torch.dtype,
    head_dim: int,
    block_size: int,
    thread_blocks: int,
    seed: int,
) -> None:
    check_fetch_blocks(CPU, kv_heads, selected, width, dtype, head_dim, block_size, thread_blocks, seed)


def test_each_admitted_chunk_is_read_once(on_cpu: Any) -> None:
    maps = occupied_maps(1, 2, 4, 8, generator(0))
    host_kv, resident = torch.randn(8, 2, 2, 16, 128), torch.zeros(1, 2, 5, 2, 16, 128)
    blocks, slots = torch.full((2, 1, 2, 3), -1, dtype=torch.int32)
    blocks[0, :, 0], slots[0, :, 0] = (maps.slot_of[0] < 0).int().argmax(-1).int(), 2
    rows, to_tokens = torch.tensor([0]), torch.arange(8 * 16, dtype=torch.int32)[None]
    before = on_cpu.bytes_read()
    number = torch.tensor([1], dtype=torch.int32)
    nothing = torch.empty(0)
    state = LayerState(resident, maps, nothing, None, host_kv, nothing, to_tokens)
    native.fetch_blocks(state, rows, DeviceAdmissions(blocks, slots), Mark(number, 0))
    assert on_cpu.bytes_read() - before == 2 * host_kv[0, 0].nbytes


def test_what_does_not_fit_is_known_before_a_launch_and_triton_serves_it(caplog: pytest.LogCaptureFixture) -> None:
    """Eight queries of 64 heads of 256 for each KV head take more shared memory than any GPU has."""
    small = ordinary_selection(200, selected=8)
    assert native.fits(small.queries, small.maps, small.fmt)
    large = torch.zeros((1, 8, 2 * 64, 256))
    assert not native.fits(large, small.maps, small.fmt)
    nothing = torch.empty(0)
    state = LayerState(nothing, small.maps, nothing, None, nothing, nothing, nothing)
    among, mark = Among(small.rows, small.candidates), Mark(nothing, 1)
    ranking = Ranking(small.fmt, small.scale, small.tightness)
    admitting = Admitting(nothing, DeviceAdmissions(nothing, nothing), nothing)
    for _ in range(2):
        declined = overrides._predict_admissions(large, state, among, ranking, mark, admitting)
        assert declined is NotImplemented
    assert [record.getMessage() for record in caplog.records] == [
        "Using Triton to select blocks: this GPU's shared memory is too small for queries of 8 x 128 x 256 and 8 slots."
    ]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda case: replace(case, candidates=case.candidates.long()), "candidates must be contiguous int32"),
        (lambda case: replace(case, rows=case.rows.int()), "rows must be contiguous int64"),
        (lambda case: replace(case, fmt=SUMMARY_FORMATS["int8"]), r"summaries must be \[S, H, N, R\]"),
        (lambda case: replace(case, queries=case.queries[..., :120]), "a multiple of 16"),
        (lambda case: replace(case, queries=case.queries.double()), "float32, float16 or bfloat16"),
        (lambda case: replace(case, averages=case.averages[:1]), r"averages must be \[S, H, N\]"),
        (lambda case: replace(case, maps=case.maps._replace(slot_of=case.maps.slot_of[:, :1])), "maps must be"),
        (lambda case: replace(case, shared_bytes=1000), "do not fit into the shared memory"),
    ],
)
def test_wrong_arguments_are_refused(damage: Any, message: str) -> None:
    with pytest.raises((ValueError, RuntimeError), match=message):
        damage(ordinary_selection(200, selected=8)).run()


def test_without_a_toolkit_one_warning_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(native, "_module", None)
    monkeypatch.setattr(native, "_attempted", False)
    monkeypatch.setattr(native, "TOOLKIT", tmp_path / "none")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.delenv("CUDA_PATH", raising=False)
    assert native.load() is native.load() is None
    assert [record.getMessage() for record in caplog.records] == [
        "The CUDA C++ kernels cannot be used, so Triton is used: "
        "there is no CUDA toolkit; install one with nvcc, or set CUDA_HOME to its folder."
    ]


def test_each_architecture_gets_its_own_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    recipes: list[compiled.Recipe] = []
    monkeypatch.setattr(compiled, "build", recipes.append)
    monkeypatch.setattr(native, "cuda_home", lambda: tmp_path)
    for architecture in ("8.0", "9.0", "9.0"):
        monkeypatch.setenv("TVM_FFI_CUDA_ARCH_LIST", architecture)
        native.build()
    assert [recipes[0].key() == recipe.key() for recipe in recipes] == [True, False, False]
    assert recipes[1] == recipes[2]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_kernels_compile_for_every_architecture_without_spills(architecture: str) -> None:
    try:
        native.cuda_home()
    except RuntimeError as error:
        pytest.skip(str(error))
    costs = kernel_costs(architecture)
    names = {f"fused_select_kernel<{name}>" for name in ("BFloat16", "Int8", "Int4")}
    assert {cost.kernel for cost in costs} == {"fetch_blocks_kernel", *names}
    assert [cost for cost in costs if cost.spill_bytes or cost.stack_bytes] == []


def test_both_kernels_move_little_more_than_they_must() -> None:
    """A decode step of a layer of Qwen3-8B with 8 requests of 32K tokens."""
    select = select_traffic(
        entries=8,
        kv_heads=8,
        query_heads=4,
        head_dim=128,
        element_bytes=2,
        fmt=SUMMARY_FORMATS["int4"],
        candidates=2048,
        selected=128,
        admitted=7,
        smoothing=True,
    )
    fetch = fetch_traffic(admissions=8 * 8 * 7, admitted=8 * 8 * 7, chunk_bytes=2 * 16 * 128 * 2)
    assert 1 <= select.ratio <= 1.25
    assert 1 <= fetch.ratio <= 1.25
