"""The native pipeline does what the plain-torch pipeline does, whatever its threads do meanwhile."""

from __future__ import annotations

import copy
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from sglang_oasis.kernels.cpu import native, overrides
from sglang_oasis.lookahead.pipelines.base import LookaheadPipeline, PredictionStep
from sglang_oasis.lookahead.pipelines.native import NativePipeline
from sglang_oasis.lookahead.pipelines.torch_ops import TorchPipeline
from sglang_oasis.lookahead.selectors import BoundSelector
from sglang_oasis.ops.attention import paged_attention
from sglang_oasis.ops.summary import SUMMARY_FORMATS, SummaryFormat, summarise_pages
from sglang_oasis.testing.throttle import throttle
from sglang_oasis.tier.host_pool import HostPool
from sglang_oasis.tier.layout import TierLayout
from sglang_oasis.tier.resident_tier import ResidentTier
from test.cases.kernel_cases import DTYPES, EXAMPLES, FORMATS, SEEDS, Heads, fitted, generator, many, occupied_maps

SMOOTHING = 0.5
"""A power of two: no rounding that could rank blocks differently."""

pytestmark = pytest.mark.usefixtures("kernels")


@dataclass
class Tiers:
    """Both tiers, full of random tokens, and what a decode step needs of their rows."""

    tier: ResidentTier
    host: HostPool
    pages: Tensor
    heads: Heads
    rng: torch.Generator

    @classmethod
    def random(
        cls, heads: Heads, budget: tuple[int, int], fmt: SummaryFormat, dtype: torch.dtype, seed: int, layers: int = 2
    ) -> Tiers:
        """Three rows; one host page per block, and one more for each row and layer."""
        selected, logical = budget
        kv_heads, _, dim, block_size = heads
        layout = TierLayout(
            num_layers=layers,
            kv_heads=kv_heads,
            head_dim=dim,
            dtype=dtype,
            block_size=block_size,
            selected_blocks=(selected,) * layers,
            recent_blocks=1,
            sink_blocks=seed % 2,
            max_blocks=logical,
            summary_format=fmt,
            smoothed=True,
        )
        rng, num_pages = generator(seed), 3 * logical + 3
        host = HostPool(
            num_pages=num_pages,
            num_layers=layers,
            kv_heads=kv_heads,
            block_size=block_size,
            head_dim=dim,
            dtype=dtype,
            summary_format=fmt,
            scalings=[fitted(fmt, kv_heads, dim, rng).scaling for _ in range(layers)],
        )
        tier = ResidentTier(layout, 3, torch.device("cpu"))
        pages = torch.randperm(num_pages, generator=rng)[: 3 * logical].view(3, logical).int()
        for layer, kv, summaries, own in zip(tier.layers, host.kv, host.summaries, host.formats, strict=True):
            kv.copy_(torch.randn(kv.shape, generator=rng))
            summarise_pages.reference(kv, torch.arange(num_pages), own, summaries)
            for held, value in zip(layer.maps, occupied_maps(3, kv_heads, selected, logical, rng), strict=True):
                held.copy_(value)
            for row in range(3):
                page = pages[row].long()
                layer.summaries[row] = summaries[page].transpose(0, 1)
                block = layer.head_map[row].long()
                layer.blocks[row, :, :selected] = kv[page[block], torch.arange(kv_heads)[:, None]]
        return cls(tier, host, pages, heads, rng)

    @property
    def budget(self) -> tuple[int, int]:
        return self.tier.layout.selected_blocks[0], self.tier.layout.max_blocks

    def step(self, number: int) -> PredictionStep:
        """Rows of a batch in any order, some of which exceed the budget."""
        rows = torch.randperm(3, generator=self.rng)
        entries = torch.randperm(3, generator=self.rng)[: 1 + number % 3].sort().values
        candidates = torch.randint(self.budget[0], self.budget[1] + 1, entries.shape, generator=self.rng)
        return PredictionStep(number, entries, rows[entries], candidates, self.pages[rows])

    def query(self, dtype: torch.dtype, queries: int = 1) -> Tensor:
        """Some tokens of a batch whose rows have one token more each."""
        kv_heads, group, dim, _ = self.heads
        fused = torch.randn((3, queries + 1, (group + 2) * kv_heads, dim), generator=self.rng).to(dtype)
        return fused[:, 1:, : group * kv_heads]

    def same_as(self, other: Tiers) -> bool:
        return all(
            torch.equal(a, b)
            for mine, theirs in zip(self.tier.layers, other.tier.layers, strict=True)
            for a, b in zip((mine.blocks, *mine.maps), (theirs.blocks, *theirs.maps), strict=True)
        ) and all(
            mine.averages is None or torch.allclose(mine.averages, theirs.averages, rtol=1e-6, atol=0)
            for mine, theirs in zip(self.tier.layers, other.tier.layers, strict=True)
        )

    def copy(self) -> Tiers:
        tier = copy.deepcopy(self.tier)
        return Tiers(tier, self.host, self.pages, self.heads, self.rng.clone_state())


def run_both(tiers: Tiers, drive: Any) -> tuple[Tiers, tuple[int, ...], tuple[int, ...]]:
    """Drive a native pipeline over the tiers and one of plain torch over a copy; returns the copy and both's results.

    Args:
        tiers: for the native one.
        drive: called with tiers and their pipeline, returns counts.
    """
    twin, selector, kernels = tiers.copy(), BoundSelector(0.5), native.kernels()

    def same_scores(queries: Tensor, records: Tensor, fmt: SummaryFormat, candidates: Tensor, scale: float) -> Tensor:
        """The kernel's own: scores that are summed in another order rank blocks that nearly tie in another order."""
        scores = torch.empty(records.shape[:3])
        how = fmt.bits, fmt.scaling, candidates, scale, selector.tightness
        kernels.score_blocks(queries.contiguous(), records, *how, scores)
        return scores

    native_pipeline = NativePipeline(tiers.tier, tiers.host, selector, SMOOTHING)
    got = drive(tiers, native_pipeline)
    got += native_pipeline.statistics()[:2]
    native_pipeline.close()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(overrides, "kernels", lambda: None)
        torch_pipeline = TorchPipeline(twin.tier, twin.host, same_scores, SMOOTHING)
        expected = drive(twin, torch_pipeline)
        expected += torch_pipeline.statistics()[:2]
        torch_pipeline.close()
    return twin, got, expected


SMALL_HEADS = st.builds(Heads, st.integers(1, 3), st.integers(1, 4), st.sampled_from([16, 32, 48, 64]), st.just(8))
SMALL_BUDGETS = st.tuples(st.integers(2, 12), st.integers(1, 30)).map(lambda x: (x[0], x[0] + x[1]))


@FORMATS
@many
@given(
    heads=SMALL_HEADS,
    budget=SMALL_BUDGETS,
    dtype=DTYPES,
    cap=st.integers(1, 12),
    queries_each=st.integers(1, 3),
    seed=SEEDS,
)
def test_the_native_pipeline_does_what_the_torch_pipeline_does(
    fmt: SummaryFormat,
    heads: Heads,
    budget: tuple[int, int],
    dtype: torch.dtype,
    cap: int,
    queries_each: int,
    seed: int,
) -> None:
    def drive(tiers: Tiers, pipeline: LookaheadPipeline) -> tuple[int, ...]:
        fetched = []
        for number in range(4, 8):
            step = tiers.step(number)
            pipeline.begin_step(step)
            pipeline.begin_urgent(step)
            queries = [tiers.query(dtype, queries_each) for _ in tiers.tier.layers]
            if number % 2:
                fetched += [pipeline.run(layer, query, 0.2, budget[0]) for layer, query in enumerate(queries)]
                continue
            for layer, query in enumerate(queries):
                pipeline.submit(layer, query, 0.2, cap)
                query.fill_(float("nan"))  # whoever submits may use the memory again
            pipeline.drain()
        return tuple(fetched)

    tiers = Tiers.random(heads, budget, fmt, dtype, seed)
    twin, got, expected = run_both(tiers, drive)
    assert got == expected
    assert tiers.same_as(twin)


def test_decode_steps_while_the_pipeline_works_give_what_they_give_one_after_another(
    kernels: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the product does: a layer waits for its own task, writes, attends and submits; other layers' tasks go on."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 12)  # three threads of the pipeline
    heads, budget, dtype, layers = Heads(2, 2, 64, 16), (8, 40), torch.bfloat16, 4
    kv_heads, _, dim, block_size = heads
    outputs: list[list[Tensor]] = []

    def drive(tiers: Tiers, pipeline: LookaheadPipeline) -> tuple[int, ...]:
        attended = []
        spare = torch.tensor(sorted({*range(tiers.host.num_pages)} - {*tiers.pages.flatten().tolist()}))
        rows = torch.arange(3)
        slots = torch.arange(budget[0] + 1).expand(3, -1).int().contiguous()
        lengths = torch.full((3,), budget[0] * block_size + 1, dtype=torch.int32)
        for number in range(4, 4 + EXAMPLES):
            step = tiers.step(number)
            offset = number % block_size
            for layer, resident in enumerate(tiers.tier.layers):
                key, value = torch.randn((2, 3, kv_heads, dim), generator=tiers.rng).to(dtype)
                query = tiers.query(dtype)
                pipeline.wait(layer)
                if layer == 0:
                    pipeline.begin_step(step)
                    pipeline.begin_urgent(step)
                tiers.host.write(layer, spare * block_size + offset, key, value)
                resident.write_tokens(rows, torch.full((3,), budget[0] * block_size), key, value)
                if offset == block_size - 1:
                    tiers.host.summarise(layer, spare)
                where = rows, slots, lengths, torch.arange(4, dtype=torch.int32)
                attended.append(paged_attention(query[:, 0], resident.blocks, *where, 0.1))
                if number % 7 == 0:
                    pipeline.run(layer, query, 0.1, budget[0])
                else:
                    pipeline.submit(layer, query, 0.1, 1 + number % 4)
        pipeline.drain()
        outputs.append(attended)
        return ()

    tiers = Tiers.random(heads, budget, SUMMARY_FORMATS["int8"], dtype, 3, layers)
    twin, got, expected = run_both(tiers, drive)
    assert got == expected
    assert tiers.same_as(twin)
    for native_output, torch_output in zip(*outputs, strict=True):
        torch.testing.assert_close(native_output, torch_output, atol=2e-2, rtol=2e-2)


def test_who_waits_for_a_task_under_way_finds_it_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tasks that take long enough to be met half done, several at once."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 12)
    heads, budget = Heads(2, 64, 64, 8), (16, 1500)

    def drive(tiers: Tiers, pipeline: LookaheadPipeline) -> tuple[int, ...]:
        left = []
        if isinstance(pipeline, NativePipeline):
            throttle(pipeline, 1e6)  # some 8 ms per row and head: no task is done before it is waited for
        for number in range(4, 6 + EXAMPLES // 20):
            pipeline.begin_step(tiers.step(number))
            for layer in range(3):
                pipeline.submit(layer, tiers.query(torch.bfloat16), 0.1, 4)
            time.sleep(0.0003)  # they begin
            for layer, resident in enumerate(tiers.tier.layers):
                pipeline.wait(layer)
                left.append(int(resident.last_selected.sum()))
                resident.blocks[:, :, budget[0] :] += 1
        if isinstance(pipeline, NativePipeline):
            assert pipeline.statistics().stalls > 0, "no task was met under way"
        return tuple(left)

    tiers = Tiers.random(heads, budget, SUMMARY_FORMATS["int4"], torch.bfloat16, 0, layers=3)
    twin, got, expected = run_both(tiers, drive)
    assert got == expected
    assert tiers.same_as(twin)


@pytest.mark.skipif(not hasattr(os, "SCHED_IDLE"), reason="Linux only")
def test_its_threads_take_only_idle_cores() -> None:
    def idle(thread: str) -> bool:
        try:
            return os.sched_getscheduler(int(thread)) == os.SCHED_IDLE
        except ProcessLookupError:  # it ended meanwhile
            return False

    def idlers() -> set[str]:
        return {task.name for task in Path("/proc/self/task").iterdir() if idle(task.name)}

    def wait_until(condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 10
        while not condition():
            assert time.monotonic() < deadline
            time.sleep(0.01)

    before = idlers()  # a joined thread of an earlier test may still be among them
    tiers = Tiers.random(Heads(1, 1, 16, 8), (4, 30), SUMMARY_FORMATS["bf16"], torch.float32, 0)
    pipeline = NativePipeline(tiers.tier, tiers.host, BoundSelector(0.5))
    wait_until(lambda: bool(idlers() - before))
    pipeline.close()
    wait_until(lambda: not idlers() - before)


def test_closing_finishes_what_is_under_way() -> None:
    tiers = Tiers.random(Heads(1, 1, 16, 8), (4, 30), SUMMARY_FORMATS["bf16"], torch.float32, 0)

    def drive(tiers: Tiers, pipeline: LookaheadPipeline) -> tuple[int, ...]:
        pipeline.begin_step(tiers.step(4))
        for layer in range(2):
            pipeline.submit(layer, tiers.query(torch.float32), 0.2, 4)
        pipeline.close()
        return ()

    before, twin = tiers.copy(), tiers.copy()
    drive(tiers, NativePipeline(tiers.tier, tiers.host, BoundSelector(0.5)))
    drive(twin, TorchPipeline(twin.tier, twin.host, BoundSelector(0.5)))
    assert tiers.same_as(twin)
    assert not tiers.same_as(before)


def test_a_closed_pipeline_says_so() -> None:
    tiers = Tiers.random(Heads(1, 1, 16, 8), (4, 30), SUMMARY_FORMATS["bf16"], torch.float32, 0)
    pipeline = NativePipeline(tiers.tier, tiers.host, BoundSelector(0.5))
    pipeline.close()
    pipeline.close()
    with pytest.raises(ValueError, match="closed"):
        pipeline.wait(0)


def test_a_layer_takes_no_second_task_before_the_first_was_waited_for() -> None:
    tiers = Tiers.random(Heads(2, 64, 64, 8), (16, 1500), SUMMARY_FORMATS["int4"], torch.bfloat16, 0)
    pipeline = NativePipeline(tiers.tier, tiers.host, BoundSelector(0.5))
    for number in range(4, 24):  # the second comes before, while and after a thread begins the first
        pipeline.begin_step(tiers.step(number))
        pipeline.submit(0, tiers.query(torch.bfloat16), 0.1, 4)
        with pytest.raises(Exception, match="not waited for"):
            pipeline.submit(0, tiers.query(torch.bfloat16), 0.1, 4)
        pipeline.wait(0)
    pipeline.close()
