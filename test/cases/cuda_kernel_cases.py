"""Cases of the CUDA C++ kernels and what must hold of them, on any place."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sglang_oasis.kernels.cuda import native
from sglang_oasis.ops.device_step import Admitting, Among, DeviceAdmissions, LayerState, Mark, Ranking
from sglang_oasis.ops.eviction import Admissions, Maps, admit_blocks, select_blocks
from sglang_oasis.ops.smoothing import ESCAPE, UNKNOWN, smooth_scores
from sglang_oasis.ops.summary import SUMMARY_FORMATS, SummaryFormat, block_scores, summarise
from test.cases.kernel_cases import fitted, generator, occupied_maps, records_of
from test.cases.places import CPU, Place

NUMBER = 20
"""Of the step: larger than any step in `occupied_maps`."""


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
    place: Place = CPU

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
        put = self.place.put
        admissions = put(torch.full((2, n, heads, self.width), 77, dtype=torch.int32))
        counted = put(torch.zeros(2, dtype=torch.int64) if counters is None else counters)
        maps = self.place.put_all(self.maps)
        averages = None if self.averages is None else put(self.averages)
        nothing = torch.empty(0)
        state = LayerState(nothing, maps, put(self.summaries), averages, nothing, nothing, nothing)
        native.fused_select(
            put(self.queries),
            state,
            Among(put(self.rows), put(self.candidates)),
            Ranking(self.fmt, self.scale, self.tightness, self.decay, self.sinks),
            Mark(put(torch.tensor([NUMBER], dtype=torch.int32)), self.offset),
            Admitting(put(torch.tensor([self.cap], dtype=torch.int32)), DeviceAdmissions(*admissions), counted),
            put(torch.full((n, heads, blocks), float("nan"))),
            shared_bytes=self.shared_bytes,
        )
        for mine, written in zip(self.maps, maps, strict=True):
            mine.copy_(written)
        if self.averages is not None and averages is not None:
            self.averages.copy_(averages)
        if counters is not None:
            counters.copy_(counted)
        return admissions[0].cpu(), admissions[1].cpu()

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


def random_selection(
    seed: int,
    fmt: SummaryFormat,
    *,
    kv_heads: int,
    group: int,
    num_queries: int,
    head_dim: int,
    selected: int,
    logical: int,
    live: int,
    padding: int,
    dtype: torch.dtype,
    smoothed: bool,
    ties: bool = False,
    decay: float = 0.8,
    sinks: int = 0,
    cap: int,
    width: int,
    offset: int = 1,
) -> Selection:
    """Three rows besides the one for padding, of which `live` decode, in any order; with `ties`, of four kinds."""
    rng = generator(seed)
    rows = torch.randperm(3, generator=rng)[:live] + 1
    candidates = torch.randint(selected + 1, logical + 1, rows.shape, generator=rng).int()
    rows = torch.cat([rows, rows.new_zeros(padding)])
    candidates = torch.cat([candidates, candidates.new_zeros(padding)])
    queries = torch.randn(len(rows), num_queries, kv_heads * group, head_dim, generator=rng).to(dtype)
    keys = torch.randn(4, kv_heads, logical, 8, head_dim, generator=rng)
    fmt = fitted(fmt, kv_heads, head_dim, rng)
    averages = None
    if smoothed:
        averages = torch.rand(4, kv_heads, logical, generator=rng) / logical
        averages[torch.rand(averages.shape, generator=rng) < 0.2] = UNKNOWN
    if ties:
        kind = torch.randint(0, min(4, logical), (logical,), generator=rng)
        keys = keys[:, :, kind]
        averages = None if averages is None else averages[..., kind]
    case = Selection(
        queries,
        records_of(keys, fmt),
        fmt,
        rows,
        candidates,
        occupied_maps(4, kv_heads, selected, logical, rng),
        averages,
        decay=decay,
        sinks=sinks,
        cap=cap,
        width=width,
        offset=offset,
        scale=head_dim**-0.5,
    )
    for row in range(4):
        used = int(candidates[rows == row].max()) if (rows == row).any() else 0
        case.summaries[row, :, used:] = 0xFF
        if averages is not None:
            averages[row, :, used:] = float("nan")
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


def check_float32_queries(place: Place, fmt: SummaryFormat) -> None:
    """The first two coordinates cancel but for the last bits, which alone tell the blocks apart."""
    queries = torch.zeros(1, 1, 1, 16)
    queries[..., 0], queries[..., 1] = 1 + 2**-9 + 2**-20, -1 - 2**-9
    heights = torch.tensor([0.0, 1.0, 3.0, 2.0, -7.0])
    keys = torch.zeros(2, 1, 5, 8, 16)
    keys[..., :2] = heights[:, None, None]
    case = Selection(
        queries,
        summarise(keys, fmt),
        fmt,
        rows=torch.tensor([1]),
        candidates=torch.tensor([5], dtype=torch.int32),
        maps=occupied_maps(2, 1, 2, 5, generator(0)),
        averages=None,
        decay=0.0,
        sinks=0,
        cap=2,
        width=2,
        scale=2**20,
        place=place,
    )
    torch.testing.assert_close(case.scores_of_kernel()[0, 0], torch.softmax(heights, 0), rtol=3e-2, atol=0)


def check_fetch_blocks(
    place: Place,
    kv_heads: int,
    selected: int,
    width: int,
    dtype: torch.dtype,
    head_dim: int,
    block_size: int,
    thread_blocks: int,
    seed: int,
) -> None:
    """Random admissions of two rows beside padding; pages that none of them names are NaN."""
    rng = generator(seed)
    logical, num_pages = selected + 8, 60
    maps = occupied_maps(3, kv_heads, selected, logical, rng)
    host_kv = torch.full((num_pages, kv_heads, 2, block_size, head_dim), float("nan"), dtype=dtype)
    pages = torch.randperm(num_pages - 1, generator=rng)[: 3 * logical].view(3, logical) + 1
    tokens = pages[..., None] * block_size + torch.arange(block_size)
    rows = torch.tensor([2, 0, 1, 0])
    blocks, slots = torch.full((2, 4, kv_heads, width), -1, dtype=torch.int32)
    for entry, head in ((entry, head) for entry in (0, 2) for head in range(kv_heads)):
        count = int(torch.randint(0, min(selected, width) + 1, (1,), generator=rng))
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
    number = torch.tensor([NUMBER], dtype=torch.int32)
    resident, maps = place.put(resident), place.put_all(maps)
    nothing = torch.empty(0)
    state = LayerState(resident, maps, nothing, None, place.pin(host_kv), nothing, place.put(tokens.flatten(1).int()))
    wanted = DeviceAdmissions(place.put(blocks), place.put(slots))
    native.fetch_blocks(state, place.put(rows), wanted, Mark(place.put(number), 1), thread_blocks)
    assert torch.equal(resident.cpu(), expected)
    for name in Maps._fields:
        assert torch.equal(getattr(maps, name).cpu(), getattr(expected_maps, name)), name
