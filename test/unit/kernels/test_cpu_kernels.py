"""Every C++ kernel equals its plain-torch reference, on every instruction set of this machine."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from sglang_oasis.ops.attention import paged_attention
from sglang_oasis.ops.eviction import Admissions, Maps, admit_blocks, graduate_blocks, select_blocks
from sglang_oasis.ops.summary import SummaryFormat, block_scores, summarise_pages
from sglang_oasis.ops.tokens import store_tokens
from sglang_oasis.tier.host_pool import HostPool
from test.cases.kernel_cases import (
    ANY_CPU,
    DTYPES,
    EXAMPLES,
    FORMATS,
    HEADS,
    NOBODY,
    SEEDS,
    THREADS,
    Heads,
    fitted,
    generator,
    many,
    occupied_maps,
    records_of,
)

pytestmark = pytest.mark.usefixtures("kernels")
REPO = Path(__file__).resolve().parents[3]
PIPELINE_TESTS = str(REPO / "test" / "unit" / "lookahead" / "test_cpu_pipeline.py")
LAYOUTS = pytest.mark.parametrize("by_row", [True, False], ids=["resident", "pages"])


@dataclass
class AttentionCase:
    """Arguments of paged_attention; K and V of no token of a sequence are NaN."""

    query: Tensor
    blocks: Tensor
    rows: Tensor
    slots: Tensor
    kv_lengths: Tensor
    query_starts: Tensor
    scale: float

    def of_kernel(self) -> Tensor:
        out = paged_attention(*vars(self).values())
        assert out.shape == self.query.shape
        assert out.dtype == self.query.dtype
        return out

    def assert_near_reference(self, tolerance: float) -> None:
        """Within `tolerance` of the float32 reference, relative to the attention-weighted mean of |V|."""
        single = {**vars(self), "query": self.query.float(), "blocks": self.blocks.float()}
        exact = paged_attention.reference(**single)
        single["blocks"] = torch.stack([single["blocks"][..., 0, :, :], single["blocks"][..., 1, :, :].abs()], dim=-3)
        bound = paged_attention.reference(**single) * tolerance + 1e-6
        error = (self.of_kernel().float() - exact).abs()
        assert (error <= bound).all(), f"{(error / bound).max():.3g} times the bound"

    def alone(self, i: int) -> AttentionCase:
        """The same with sequence i only."""
        tokens = slice(int(self.query_starts[i]), int(self.query_starts[i + 1]))
        starts = torch.tensor([0, tokens.stop - tokens.start], dtype=torch.int32)
        where = (x[i : i + 1] for x in (self.rows, self.slots, self.kv_lengths))
        return AttentionCase(self.query[tokens], self.blocks, *where, starts, self.scale)


def attention_case(
    heads: Heads, sequences: list[tuple[int, int]], dtype: torch.dtype, by_row: bool, seed: int, scale: float
) -> AttentionCase:
    """Sequences of (tokens before the query tokens, query tokens), in slots that are anywhere."""
    rng = generator(seed)
    kv_heads, group, dim, block_size = heads
    lengths = [prefix + new for prefix, new in sequences]
    used = [-(-length // block_size) for length in lengths]
    width = max(used) + 2
    chunk = (2, block_size, dim)
    rows = torch.randperm(len(sequences) + 1, generator=rng)[: len(sequences)]
    slots = torch.full((len(sequences), width), NOBODY, dtype=torch.int32)
    pages = torch.randperm(sum(used) + 2, generator=rng).int()
    shape = (len(sequences) + 1, kv_heads, width, *chunk) if by_row else (sum(used) + 2, kv_heads, *chunk)
    blocks = torch.full(shape, float("nan"), dtype=dtype)
    for i, count in enumerate(used):
        slots[i, :count] = (torch.randperm(width, generator=rng) if by_row else pages)[:count]
        pages = pages if by_row else pages[count:]
        chunks = torch.randn((kv_heads, count, *chunk), generator=rng)
        if lengths[i] % block_size:
            chunks[:, -1, :, lengths[i] % block_size :] = float("nan")
        if by_row:
            blocks[rows[i], :, slots[i, :count]] = chunks.to(dtype)
        else:
            blocks[slots[i, :count]] = chunks.to(dtype).transpose(0, 1)
    starts = torch.tensor([0, *(new for _, new in sequences)]).cumsum(0).int()
    fused = torch.randn((int(starts[-1]), (group + 2) * kv_heads, dim), generator=rng).to(dtype)
    return AttentionCase(fused[:, : group * kv_heads], blocks, rows, slots, torch.tensor(lengths).int(), starts, scale)


TOLERANCE = {
    torch.float32: 2e-5,
    torch.float16: 2**-11 + 1e-4,  # the result is rounded
    torch.bfloat16: 2 * 2**-8 + 1e-4,  # the result is rounded, and so may the softmax weights be
}
SCALES = st.floats(0.02, 0.25)
PREFIXES = st.one_of(st.integers(0, 70), st.integers(0, 600), st.integers(900, 2300))
DECODE = st.lists(st.tuples(PREFIXES, st.integers(0, 8)), min_size=1, max_size=4)
EXTEND = st.lists(st.tuples(st.integers(0, 300), st.integers(0, 200)), min_size=1, max_size=2)


@LAYOUTS
@pytest.mark.parametrize("sequences", [DECODE, EXTEND], ids=["decode", "extend"])
@many
@given(data=st.data(), heads=HEADS, dtype=DTYPES, scale=SCALES, seed=SEEDS)
def test_attention(
    by_row: bool,
    sequences: st.SearchStrategy[list[tuple[int, int]]],
    data: st.DataObject,
    heads: Heads,
    dtype: torch.dtype,
    scale: float,
    seed: int,
) -> None:
    attention_case(heads, data.draw(sequences), dtype, by_row, seed, scale).assert_near_reference(TOLERANCE[dtype])


@many
@given(heads=HEADS, sequences=DECODE, seed=SEEDS, query=DTYPES, stored=DTYPES)
def test_attention_of_queries_of_another_dtype(
    heads: Heads, sequences: list[tuple[int, int]], seed: int, query: torch.dtype, stored: torch.dtype
) -> None:
    case = attention_case(heads, sequences, stored, True, seed, 0.1)
    case.query = case.query.to(query)
    case.assert_near_reference(0.02)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("length", [1023, 1024, 1025, 2048, 2049, 2100])
@pytest.mark.parametrize("new", [1, 8, 70])
def test_attention_where_the_key_ranges_meet(dtype: torch.dtype, length: int, new: int) -> None:
    """Some query tokens see nothing of the last range."""
    attention_case(Heads(2, 2, 64, 16), [(length - new, new)], dtype, False, length, 0.2).assert_near_reference(
        TOLERANCE[dtype]
    )


@pytest.mark.parametrize("group", [1, 3, 64, 65, 80])
def test_attention_of_groups_that_fill_a_piece_of_work(group: int) -> None:
    attention_case(Heads(1, group, 32, 8), [(70, 3), (0, 3)], torch.float32, True, group, 0.2).assert_near_reference(
        2e-5
    )


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_a_key_that_scores_far_above_the_others_gets_all_the_weight(dtype: torch.dtype) -> None:
    for position in (0, 63, 64, 700, 1299):
        case = attention_case(Heads(1, 4, 64, 16), [(1299, 1)], dtype, False, position, 10.0)
        chunk = case.blocks[int(case.slots[0, position // 16]), 0, :, position % 16]
        chunk[0] = 20 * case.query[0, 0]
        assert torch.equal(case.of_kernel()[0, 0], chunk[1])


def test_rounded_weights_are_neither_too_large_nor_too_small_on_average() -> None:
    """Coordinates of one value each: the results, rounded again, keep them all when the weights are right."""
    case = attention_case(Heads(1, 4, 64, 16), [(1279, 1)], torch.bfloat16, False, 0, 0.1)
    value = 1 + torch.arange(64) / 128
    case.blocks[..., 1, :, :] = value.bfloat16()
    assert torch.equal(case.of_kernel().float(), value.expand(1, 4, 64))


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("new", [1, 4, 9, 40], ids=lambda new: f"{4 * new} query vectors")
def test_float32_queries_lose_nothing_on_a_narrower_pool(stored: torch.dtype, new: int) -> None:
    """Neither they nor the softmax weights are rounded to the pool's dtype."""
    case = attention_case(Heads(2, 4, 64, 16), [(1200 - new, new)], stored, False, new, 0.2)
    case.query = torch.randn(case.query.shape, generator=generator(new))
    case.assert_near_reference(TOLERANCE[torch.float32])


@many
@given(heads=HEADS, sequences=DECODE, dtype=DTYPES, seed=SEEDS)
def test_a_sequence_gets_the_same_bits_alone_in_any_layout_on_any_number_of_threads(
    kernels: Any, heads: Heads, sequences: list[tuple[int, int]], dtype: torch.dtype, seed: int
) -> None:
    case = attention_case(heads, sequences, dtype, True, seed, 0.1)
    together = case.of_kernel()
    kernels.configure_threads(1, ANY_CPU)
    try:
        alone = [case.alone(i) for i in range(len(sequences))]
        assert torch.equal(together, torch.cat([one.of_kernel() for one in alone]))
        for one in alone:
            one.blocks = case.blocks[int(one.rows)].transpose(0, 1).contiguous()
        assert torch.equal(together, torch.cat([one.of_kernel() for one in alone]))
    finally:
        kernels.configure_threads(THREADS, ANY_CPU)


def test_heads_that_the_kernels_cannot_serve_are_left_to_the_reference() -> None:
    for dim in (24, 528):
        case = attention_case(Heads(2, 2, dim, 8), [(20, 2)], torch.float32, True, dim, 0.1)
        assert torch.equal(case.of_kernel(), paged_attention.reference(*vars(case).values()))


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ({"kv_lengths": torch.tensor([22])}, "kv_lengths must be contiguous int32"),
        ({"slots": torch.zeros(2, 5).int()}, "must agree on the number of sequences"),
        ({"query": torch.zeros(2, 3, 32)}, "multiple of KV heads"),
        ({"query": torch.zeros(2, 4, 16)}, "must be contiguous vectors|tokens must be"),
        ({"query": torch.zeros(2, 4, 32, dtype=torch.float64)}, "dtype must be float32, float16 or bfloat16"),
        ({"blocks": torch.zeros(3, 2, 2, 32, 8).transpose(-1, -2)}, "one contiguous chunk"),
    ],
)
def test_wrong_arguments_are_refused(argument: dict[str, Tensor], message: str) -> None:
    case = attention_case(Heads(2, 2, 32, 8), [(20, 2)], torch.float32, False, 0, 0.1)
    with pytest.raises(ValueError, match=message):
        paged_attention(*{**vars(case), **argument}.values())


def special_floats(shape: tuple[int, ...], rng: torch.Generator) -> Tensor:
    """Floats of all magnitudes, halfway cases of rounding among them, infinities and zeros."""
    bits = torch.randint(-(2**31), 2**31, shape, generator=rng)
    bits = torch.where(torch.rand(shape, generator=rng) < 0.3, bits & ~0xFFFF | 0x8000, bits)
    bits = torch.where(torch.rand(shape, generator=rng) < 0.3, bits & ~0x1FFF | 0x1000, bits)
    any_magnitude = bits.int().view(torch.float32)
    sample = torch.where(torch.rand(shape, generator=rng) < 0.5, any_magnitude, torch.randn(shape, generator=rng))
    of_float16 = torch.randn(shape, generator=rng) * 2.0 ** torch.randint(-26, 18, shape, generator=rng)
    return torch.where(torch.rand(shape, generator=rng) < 0.5, sample, of_float16)


@LAYOUTS
@many
@given(heads=HEADS, tokens=st.integers(0, 150), given_as=DTYPES, stored_as=DTYPES, seed=SEEDS)
def test_store_tokens(
    by_row: bool, heads: Heads, tokens: int, given_as: torch.dtype, stored_as: torch.dtype, seed: int
) -> None:
    rng = generator(seed)
    kv_heads, group, dim, block_size = heads
    fused = special_floats((tokens, (group + 2) * kv_heads, dim), rng).to(given_as)
    keys, values = fused[:, -2 * kv_heads : -kv_heads], fused[:, -kv_heads:].contiguous()
    slots = -(-tokens // block_size) + 1
    shape = (2, kv_heads, slots, 2, block_size, dim) if by_row else (slots, kv_heads, 2, block_size, dim)
    expected = torch.randn(shape, generator=rng).to(stored_as)
    got = expected.clone()
    rows = torch.randint(2, (tokens,), generator=rng) if by_row else None
    positions = torch.randperm(slots * block_size, generator=rng)[:tokens]
    store_tokens.reference(expected, rows, positions, keys, values)
    store_tokens(got, rows, positions, keys, values)
    bits = torch.int32 if stored_as == torch.float32 else torch.int16
    same = (got.view(bits) == expected.view(bits)) | (got.isnan() & expected.isnan())
    assert same.all()


@LAYOUTS
def test_no_tokens_are_stored_whatever_their_strides(by_row: bool) -> None:
    keys, values = torch.empty(0, 2, 2, 16).unbind(2)
    assert keys.stride(1) == 32
    blocks = torch.zeros((1, 2, 3, 2, 8, 16) if by_row else (3, 2, 2, 8, 16))
    none = torch.empty(0, dtype=torch.int64)
    store_tokens(blocks, none if by_row else None, none, keys, values)
    assert not blocks.any()


@FORMATS
@many
@given(
    heads=HEADS, dtype=DTYPES, pages=st.integers(0, 40), magnitude=st.sampled_from([0.0, 1e-3, 1.0, 50.0]), seed=SEEDS
)
def test_summarise_pages(
    fmt: SummaryFormat, heads: Heads, dtype: torch.dtype, pages: int, magnitude: float, seed: int
) -> None:
    rng = generator(seed)
    kv_heads, _, dim, block_size = heads
    fmt = fitted(fmt, kv_heads, dim, rng)
    host_kv = (torch.randn((pages + 3, kv_heads, 2, block_size, dim), generator=rng) * magnitude + 0.0).to(dtype)
    host_kv[::5, :, 0, 1:] = host_kv[::5, :, 0, :1]  # ranges of zero
    chosen = torch.randperm(pages + 3, generator=rng)[:pages]
    expected = torch.full((pages + 3, kv_heads, fmt.record_bytes(dim)), 77, dtype=torch.uint8)
    got = expected.clone()
    summarise_pages.reference(host_kv, chosen, fmt, expected)
    summarise_pages(host_kv, chosen, fmt, got)
    assert torch.equal(got, expected)


@FORMATS
@many
@given(
    heads=HEADS,
    dtype=DTYPES,
    entries=st.integers(1, 3),
    queries=st.integers(1, 4),
    blocks=st.integers(1, 70),
    tightness=st.sampled_from([0.0, 0.5, 1.0]),
    seed=SEEDS,
)
def test_block_scores(
    fmt: SummaryFormat,
    heads: Heads,
    dtype: torch.dtype,
    entries: int,
    queries: int,
    blocks: int,
    tightness: float,
    seed: int,
) -> None:
    rng = generator(seed)
    kv_heads, group, dim, _ = heads
    fmt = fitted(fmt, kv_heads, dim, rng)
    records = records_of(torch.randn((entries, kv_heads, blocks + 2, 8, dim), generator=rng), fmt)[:, :, :blocks]
    candidates = torch.randint(1, blocks + 1, (entries,), generator=rng)
    query = torch.randn((entries, queries, kv_heads * group, dim), generator=rng).to(dtype)
    arguments = query, records, fmt, candidates, 0.2, tightness
    expected, got = block_scores.reference(*arguments), block_scores(*arguments)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-8)


class LayerCase(NamedTuple):
    """A layer of the resident tier in which every selected slot is occupied, and its host pages."""

    blocks: Tensor
    maps: Maps
    host_kv: Tensor
    pages: Tensor

    def clone(self) -> LayerCase:
        return LayerCase(self.blocks.clone(), Maps(*(m.clone() for m in self.maps)), self.host_kv, self.pages)

    def same_as(self, other: LayerCase) -> bool:
        pairs = zip((self.blocks, *self.maps), (other.blocks, *other.maps), strict=True)
        return all(torch.equal(a, b) for a, b in pairs)


def layer_case(heads: Heads, selected: int, logical: int, dtype: torch.dtype, seed: int) -> LayerCase:
    rng = generator(seed)
    num_rows, chunk = 3, (2, heads.block_size, heads.head_dim)
    return LayerCase(
        torch.randn((num_rows, heads.kv_heads, selected + 2, *chunk), generator=rng).to(dtype),
        occupied_maps(num_rows, heads.kv_heads, selected, logical, rng),
        torch.randn((2 * logical, heads.kv_heads, *chunk), generator=rng).to(dtype),
        torch.stack([torch.randperm(2 * logical, generator=rng)[:logical] for _ in range(num_rows)]).int(),
    )


BUDGETS = st.tuples(st.integers(1, 40), st.integers(0, 40)).map(lambda x: (x[0], x[0] + x[1]))


@many
@given(
    budget=BUDGETS,
    kv_heads=st.integers(1, 3),
    cap=st.integers(1, 45),
    distinct=st.sampled_from([1, 3, 10, 10**6]),
    sinks=st.integers(0, 3),
    seed=SEEDS,
)
def test_select_blocks(budget: tuple[int, int], kv_heads: int, cap: int, distinct: int, sinks: int, seed: int) -> None:
    """Few distinct scores make ties; infinite scores are what sinks have."""
    selected, logical = budget
    rng = generator(seed)
    maps = occupied_maps(3, kv_heads, selected, logical, rng)
    rows = torch.randperm(3, generator=rng)[:2]
    candidates = torch.randint(selected, logical + 1, (2,), generator=rng)
    scores = torch.randint(-distinct, distinct, (2, kv_heads, int(candidates.max())), generator=rng) + 0.5
    scores[..., :sinks] = float("inf")
    scores.masked_fill_((torch.arange(scores.shape[-1]) >= candidates[:, None])[:, None], float("-inf"))
    other = Maps(*(m.clone() for m in maps))
    expected = select_blocks.reference(scores, candidates, rows, maps, 7, cap)
    got = select_blocks(scores, candidates, rows, other, 7, cap)
    assert torch.equal(got.blocks, expected.blocks)
    assert torch.equal(got.slots, expected.slots)
    assert got.deferred == expected.deferred
    assert all(torch.equal(a, b) for a, b in zip(maps, other, strict=True))


@many
@given(heads=HEADS, budget=BUDGETS, dtype=DTYPES, seed=SEEDS)
def test_admit_blocks(heads: Heads, budget: tuple[int, int], dtype: torch.dtype, seed: int) -> None:
    selected, logical = budget
    case, rng = layer_case(heads, selected, logical, dtype, seed), generator(seed)
    rows = torch.randperm(3, generator=rng)[:2]
    width = max(1, min(selected, logical - selected))
    blocks, slots = torch.full((2, 2, heads.kv_heads, width), -1, dtype=torch.int32)
    for entry, head in torch.cartesian_prod(torch.arange(2), torch.arange(heads.kv_heads)).tolist():
        absent = (case.maps.slot_of[rows[entry], head] < 0).nonzero().flatten().int()
        count = int(torch.randint(0, min(width, len(absent)) + 1, (1,), generator=rng))
        blocks[entry, head, :count] = absent[torch.randperm(len(absent), generator=rng)[:count]]
        slots[entry, head, :count] = torch.randperm(selected, generator=rng)[:count].int()
    other = case.clone()
    for op, (resident, maps, host_kv, pages) in ((admit_blocks.reference, case), (admit_blocks, other)):
        op(resident, maps, host_kv, pages[rows], rows, Admissions(blocks, slots, 0), 7)
    assert other.same_as(case)


@many
@given(heads=HEADS, budget=BUDGETS, dtype=DTYPES, graduates=st.integers(0, 3), seed=SEEDS)
def test_graduate_blocks(heads: Heads, budget: tuple[int, int], dtype: torch.dtype, graduates: int, seed: int) -> None:
    selected, logical = budget
    case, rng = layer_case(heads, selected, logical, dtype, seed), generator(seed)
    rows = torch.randperm(3, generator=rng)[:graduates]
    blocks = torch.randint(0, logical, (graduates,), generator=rng)
    local_slots = selected + torch.randint(0, 2, (graduates,), generator=rng)
    other = case.clone()
    for op, (resident, maps, *_) in ((graduate_blocks.reference, case), (graduate_blocks, other)):
        op(resident, maps, rows, blocks, local_slots, 7)
    assert other.same_as(case)


def test_moving_tokens_of_the_host_pool() -> None:
    """`HostPool.move` hands over views whose heads are not side by side."""
    host = HostPool(
        num_pages=4,
        num_layers=2,
        kv_heads=3,
        block_size=8,
        head_dim=16,
        dtype=torch.bfloat16,
        summary_format=None,
    )
    keys, values = torch.randn(2, 5, 3, 16)
    source, target = torch.arange(8, 13), torch.arange(26, 31)
    for layer in range(2):
        host.write(layer, source, keys, values)
    host.move(target, source)
    moved = torch.stack([keys, values], dim=2).bfloat16()
    assert all(torch.equal(host.read(layer, target), moved) for layer in range(2))


@pytest.mark.skipif("SGLANG_OASIS_CPU_ISA" in os.environ, reason="one instruction set was asked for")
@pytest.mark.parametrize("isa", ["baseline", "avx2", "avx512", "avx512bf16"])
def test_other_instruction_sets_too(kernels: Any, isa: str) -> None:
    """The choice is made once per process, so each gets its own."""
    if isa == kernels.instruction_set():
        pytest.skip("all other tests ran on it")
    environment = {**os.environ, "SGLANG_OASIS_CPU_ISA": isa, "OASIS_KERNEL_EXAMPLES": str(max(1, EXAMPLES // 5))}
    choice = "from sglang_oasis.kernels.cpu import native; print(native.load().instruction_set())"
    chosen = subprocess.run([sys.executable, "-c", choice], env=environment, capture_output=True, text=True)
    if "which this machine does not run" in chosen.stderr:
        pytest.skip("this machine does not have it")
    assert chosen.stdout.split() == [isa], chosen.stderr
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__, PIPELINE_TESTS]
    tests = subprocess.run(command, env=environment, cwd=REPO, capture_output=True, text=True)
    assert tests.returncode == 0, tests.stdout + tests.stderr
