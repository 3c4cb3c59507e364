"""The CUDA C++ kernels, run on the CPU by test/cuda_on_cpu, do what their plain-torch references do."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import tvm_ffi
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from sglang_oasis.ops import compiled, cuda_kernels
from sglang_oasis.ops.cuda_report import ARCHITECTURES, fetch_traffic, kernel_costs, select_traffic
from sglang_oasis.ops.eviction import Admissions, Maps, admit_blocks, select_blocks
from sglang_oasis.ops.smoothing import ESCAPE, UNKNOWN, smooth_scores
from sglang_oasis.ops.summary import SUMMARY_FORMATS, SummaryFormat, block_scores, summarise
from test.unit.kernel_cases import BLOCK_SIZES, DTYPES, EXAMPLES, FORMATS, HEAD_DIMS, SEEDS, generator, occupied_maps

ON_CPU = Path(__file__).resolve().parents[1] / "cuda_on_cpu"
NUMBER = 20
"""Of the step: larger than any step in `occupied_maps`."""

some = settings(max_examples=max(1, EXAMPLES // 4), deadline=None, suppress_health_check=list(HealthCheck))


@pytest.fixture(scope="module", autouse=True)
def on_cpu() -> Iterator[Any]:
    """The kernels, compiled for the CPU, in the place of those for a GPU."""
    if shutil.which(os.environ.get("CXX", "c++")) is None:
        pytest.skip("no C++ compiler")
    extra = tuple(os.environ.get("SGLANG_OASIS_CPU_CFLAGS", "").split())
    cflags = ("-O2", "-Wall", "-Wno-unknown-pragmas", *extra)
    folders = (ON_CPU, compiled.source_folder("cuda"))
    recipe = compiled.Recipe("oasis_cuda_on_cpu", "CUDA kernels for tests", folders, cflags, ldflags=extra)
    module = tvm_ffi.load_module(str(compiled.build(recipe)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda_kernels, "_module", module)
        yield module


@dataclass
class Selection:
    """Arguments of fused_select; summaries and averages of what is no candidate are NaN or their like."""

    queries: Tensor
    summaries: Tensor
    fmt: SummaryFormat
    rows: Tensor
    candidates: Tensor
    maps: Maps
    averages: Tensor | None
    decay: float
    sinks: int
    cap: int
    width: int
    offset: int = 1
    scale: float = 0.3
    tightness: float = 0.6
    shared_bytes: int = 0

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """n, H, K, N."""
        return len(self.rows), *self.maps.head_map.shape[1:], self.maps.slot_of.shape[-1]

    def copy(self) -> Selection:
        averages = None if self.averages is None else self.averages.clone()
        return replace(self, averages=averages, maps=Maps(*(part.clone() for part in self.maps)))

    def run(self, counters: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Blocks and slots [n, H, C]; marks in the maps, updates the averages."""
        n, heads, _, blocks = self.shape
        admissions = torch.full((2, n, heads, self.width), 77, dtype=torch.int32)
        cuda_kernels.fused_select(
            self.queries,
            self.summaries,
            self.fmt,
            self.rows,
            self.candidates,
            self.maps,
            self.averages,
            self.scale,
            self.tightness,
            self.decay,
            self.sinks,
            torch.tensor([NUMBER], dtype=torch.int32),
            self.offset,
            torch.tensor([self.cap], dtype=torch.int32),
            (admissions[0], admissions[1]),
            torch.zeros(2, dtype=torch.int64) if counters is None else counters,
            torch.full((n, heads, blocks), float("nan")),
            shared_bytes=self.shared_bytes,
        )
        return admissions[0], admissions[1]

    def scores_of_kernel(self) -> Tensor:
        """[n, H, N]: what the kernel ranks by, to the bit, before the sinks; -inf where there is no candidate."""
        twin = self.copy()
        if twin.averages is None:  # those of blocks that were never scored become the scores
            twin.averages = torch.full((len(self.maps.slot_of), *self.shape[1::2]), UNKNOWN)
        twin.run()
        assert twin.averages is not None
        return twin.averages[self.rows].masked_fill_(~self.eligible(), float("-inf"))

    def scores_of_reference(self) -> Tensor:
        """The same of the plain-torch ops."""
        records, candidates = self.summaries[self.rows], self.candidates.long()
        scores = block_scores.reference(self.queries, records, self.fmt, candidates, self.scale, self.tightness)
        if self.averages is not None:
            smooth_scores.reference(self.averages.clone(), self.rows, scores, candidates, self.decay, ESCAPE)
        return scores.masked_fill_(~self.eligible(), float("-inf"))

    def eligible(self) -> Tensor:
        """[n, H, N] bool: candidates."""
        candidate = torch.arange(self.shape[3]) < self.candidates[:, None]
        return candidate[:, None].expand(-1, self.shape[1], -1)

    def select_by_reference(self, scores: Tensor) -> Admissions:
        """What those scores select; marks in the maps. Entries without candidates do not take part."""
        scores[..., : self.sinks] = float("inf")
        works = self.candidates > 0
        step = 2 * NUMBER + self.offset
        rows, candidates = self.rows[works], self.candidates[works].long()
        cap = min(self.cap, self.width)
        admissions = select_blocks.reference(scores[works], candidates, rows, self.maps, step, cap)
        blocks, slots = torch.full((2, len(works), self.shape[1], self.width), -1, dtype=torch.int32)
        blocks[works, :, : admissions.blocks.shape[-1]] = admissions.blocks
        slots[works, :, : admissions.slots.shape[-1]] = admissions.slots
        return Admissions(blocks, slots, admissions.deferred)


@st.composite
def selections(draw: st.DrawFn, fmt: SummaryFormat, ties: bool = False) -> Selection:
    """Three rows besides the one for padding, of which some decode, in any order."""
    rng = generator(draw(SEEDS))
    kv_heads, group, num_queries = draw(st.integers(1, 2)), draw(st.integers(1, 5)), draw(st.sampled_from([1, 1, 2, 5]))
    head_dim, selected = draw(HEAD_DIMS), draw(st.integers(1, 20))
    logical = selected + draw(st.integers(1, 150))
    rows = torch.randperm(3, generator=rng)[: draw(st.integers(1, 3))] + 1
    candidates = torch.randint(selected + 1, logical + 1, rows.shape, generator=rng).int()
    padding = draw(st.integers(0, 2))
    rows = torch.cat([rows, rows.new_zeros(padding)])
    candidates = torch.cat([candidates, candidates.new_zeros(padding)])
    queries = torch.randn(len(rows), num_queries, kv_heads * group, head_dim, generator=rng).to(draw(DTYPES))
    keys = torch.randn(4, kv_heads, logical, 8, head_dim, generator=rng)
    averages = None
    if draw(st.booleans()):
        averages = torch.rand(4, kv_heads, logical, generator=rng) / logical
        averages[torch.rand(averages.shape, generator=rng) < 0.2] = UNKNOWN
    if ties:
        kind = torch.randint(0, min(4, logical), (logical,), generator=rng)
        keys = keys[:, :, kind]
        averages = None if averages is None else averages[..., kind]
    case = Selection(
        queries,
        summarise(keys, fmt),
        fmt,
        rows,
        candidates,
        occupied_maps(4, kv_heads, selected, logical, rng),
        averages,
        decay=draw(st.sampled_from([0.0, 0.8])),
        sinks=draw(st.integers(0, min(2, selected))),
        cap=draw(st.integers(1, selected + 1)),
        width=draw(st.integers(1, selected)),
        offset=draw(st.integers(0, 1)),
        scale=head_dim**-0.5,
    )
    for row in range(4):
        used = int(candidates[rows == row].max()) if (rows == row).any() else 0
        case.summaries[row, :, used:] = 0xFF
        if averages is not None:
            averages[row, :, used:] = float("nan")
    least = cuda_kernels.kernels().shared_bytes_without_logits(queries, fmt.bits, kv_heads, selected)
    room = draw(st.sampled_from([None, 0, 40]))  # blocks whose logits fit
    case.shared_bytes = 0 if room is None else least + room * group * num_queries * 4
    return case


def assert_selects_like_reference(case: Selection, scores: Tensor) -> None:
    """Maps, averages, admissions and counters are what the kernel's own scores select: near-ties are no excuse."""
    expected = case.copy()
    admissions = expected.select_by_reference(scores.clone())
    counters = torch.tensor([1000, 2000])
    blocks, slots = case.run(counters)
    assert torch.equal(blocks, admissions.blocks)
    assert torch.equal(slots, admissions.slots)
    assert counters.tolist() == [1000 + admissions.admitted, 2000 + admissions.deferred]
    for name in Maps._fields:
        assert torch.equal(getattr(case.maps, name), getattr(expected.maps, name)), name
    if case.averages is not None:
        assert expected.averages is not None
        for row, candidates, score in zip(case.rows, case.candidates, scores, strict=True):
            expected.averages[row, :, :candidates] = score[:, :candidates]
        torch.testing.assert_close(case.averages, expected.averages, rtol=0, atol=0, equal_nan=True)


@FORMATS
@some
@given(data=st.data())
def test_blocks_score_as_by_the_references(fmt: SummaryFormat, data: st.DataObject) -> None:
    case = data.draw(selections(fmt))
    torch.testing.assert_close(case.scores_of_kernel(), case.scores_of_reference(), rtol=2e-5, atol=1e-9)


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


def ordinary_selection(candidates: int, selected: int = 128, fmt: str = "int4") -> Selection:
    """One request of a layer like Qwen3-8B's, with a quarter of its heads."""
    rng = generator(3)
    keys = torch.randn(2, 2, candidates, 16, 128, generator=rng)
    return Selection(
        queries=torch.randn(1, 1, 8, 128, generator=rng).bfloat16(),
        summaries=summarise(keys, SUMMARY_FORMATS[fmt]),
        fmt=SUMMARY_FORMATS[fmt],
        rows=torch.tensor([1]),
        candidates=torch.tensor([candidates], dtype=torch.int32),
        maps=occupied_maps(2, 2, selected, candidates, rng),
        averages=torch.full((2, 2, candidates), UNKNOWN),
        decay=0.8,
        sinks=1,
        cap=7,
        width=7,
    )


@FORMATS
def test_a_long_row_selects_like_the_reference(fmt: SummaryFormat) -> None:
    case = ordinary_selection(2048, fmt=fmt.name)
    scores = case.scores_of_kernel()
    torch.testing.assert_close(scores, case.scores_of_reference(), rtol=2e-5, atol=1e-9)
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
@given(data=st.data(), dtype=DTYPES, head_dim=HEAD_DIMS, block_size=BLOCK_SIZES, seed=SEEDS)
def test_admitted_blocks_are_loaded_and_replace_others_in_the_maps(
    data: st.DataObject, dtype: torch.dtype, head_dim: int, block_size: int, seed: int
) -> None:
    rng = generator(seed)
    kv_heads, selected, width = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 6)), data.draw(st.integers(1, 8))
    logical, num_pages = selected + 8, 60
    maps = occupied_maps(3, kv_heads, selected, logical, rng)
    host_kv = torch.full((num_pages, kv_heads, 2, block_size, head_dim), float("nan"), dtype=dtype)
    pages = torch.randperm(num_pages - 1, generator=rng)[: 3 * logical].view(3, logical) + 1
    tokens = pages[..., None] * block_size + torch.arange(block_size)
    rows = torch.tensor([2, 0, 1, 0])
    blocks, slots = torch.full((2, 4, kv_heads, width), -1, dtype=torch.int32)
    for entry, head in ((entry, head) for entry in (0, 2) for head in range(kv_heads)):
        count = data.draw(st.integers(0, min(selected, width)))
        missing = (maps.slot_of[rows[entry], head] < 0).nonzero().flatten()
        blocks[entry, head, :count] = missing[torch.randperm(len(missing), generator=rng)[:count]].int()
        slots[entry, head, :count] = torch.randperm(selected, generator=rng)[:count].int()
        loaded = pages[rows[entry], blocks[entry, head, :count].long()]
        chunks = torch.randn(count, 2, block_size, head_dim, generator=rng)
        host_kv[loaded, head] = chunks.to(dtype)
    resident = torch.randn(3, kv_heads, selected + 2, 2, block_size, head_dim, generator=rng).to(dtype)
    expected, expected_maps = resident.clone(), Maps(*(part.clone() for part in maps))
    admissions = Admissions(blocks, slots, 0)
    admit_blocks.reference(expected, expected_maps, host_kv, pages[rows].int(), rows, admissions, 2 * NUMBER + 1)
    thread_blocks = data.draw(st.integers(1, 4))
    number = torch.tensor([NUMBER], dtype=torch.int32)
    to_tokens = tokens.flatten(1).int()
    cuda_kernels.fetch_blocks(
        resident, maps, host_kv, to_tokens, rows, (blocks, slots), number, 1, thread_blocks=thread_blocks
    )
    assert torch.equal(resident, expected)
    for name in Maps._fields:
        assert torch.equal(getattr(maps, name), getattr(expected_maps, name)), name


def test_each_admitted_chunk_is_read_once(on_cpu: Any) -> None:
    maps = occupied_maps(1, 2, 4, 8, generator(0))
    host_kv, resident = torch.randn(8, 2, 2, 16, 128), torch.zeros(1, 2, 5, 2, 16, 128)
    blocks, slots = torch.full((2, 1, 2, 3), -1, dtype=torch.int32)
    blocks[0, :, 0], slots[0, :, 0] = (maps.slot_of[0] < 0).int().argmax(-1).int(), 2
    rows, to_tokens = torch.tensor([0]), torch.arange(8 * 16, dtype=torch.int32)[None]
    before = on_cpu.bytes_read()
    number = torch.tensor([1], dtype=torch.int32)
    cuda_kernels.fetch_blocks(resident, maps, host_kv, to_tokens, rows, (blocks, slots), number, 0)
    assert on_cpu.bytes_read() - before == 2 * host_kv[0, 0].nbytes


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
    monkeypatch.setattr(cuda_kernels, "_module", None)
    monkeypatch.setattr(cuda_kernels, "_attempted", False)
    monkeypatch.setattr(cuda_kernels, "TOOLKIT", tmp_path / "none")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.delenv("CUDA_PATH", raising=False)
    assert cuda_kernels.load() is cuda_kernels.load() is None
    assert [record.getMessage() for record in caplog.records] == [
        "The CUDA C++ kernels cannot be used, Triton does it: "
        "there is no CUDA toolkit; install one with nvcc, or set CUDA_HOME to its folder."
    ]


def test_each_architecture_gets_its_own_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    recipes: list[compiled.Recipe] = []
    monkeypatch.setattr(compiled, "build", recipes.append)
    monkeypatch.setattr(cuda_kernels, "cuda_home", lambda: tmp_path)
    for architecture in ("8.0", "9.0", "9.0"):
        monkeypatch.setenv("TVM_FFI_CUDA_ARCH_LIST", architecture)
        cuda_kernels.build()
    assert [recipes[0].key() == recipe.key() for recipe in recipes] == [True, False, False]
    assert recipes[1] == recipes[2]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_kernels_compile_for_every_architecture_without_spills(architecture: str) -> None:
    try:
        cuda_kernels.cuda_home()
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
