"""The device's engine does what the host's does: the same schedules, and both side by side."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from torch import Tensor

from sglang_oasis.engine.attention import triton
from sglang_oasis.engine.attention.base import AttentionSetup, DeviceAttention
from sglang_oasis.engine.base import Engine, EngineSetup
from sglang_oasis.engine.device import DeviceEngine, DeviceSetup
from sglang_oasis.engine.plan import DecodePlan
from sglang_oasis.engine.slot_tables import HeadPages, SlotTable
from sglang_oasis.lookahead.sources import SOURCES
from sglang_oasis.ops.streams import SerialStreams
from test.cases.cuda_emulation import load
from test.cases.device_ops import cuda_ops_on
from test.cases.schedule import BLOCK, CONTEXT, HEADS, KV_DTYPES, ROWS, SCALE, Schedule

CPU = torch.device("cpu")
CAPTURED = (1, 2, ROWS)
"""Batch sizes of the graphs; entries that pad a batch are the dummy row."""


class ScheduleOnDevice(Schedule):
    """The same requests, served by the device's engine on its ops' references."""

    kernels = False

    @initialize(
        budget_blocks=st.integers(2, 6),
        recent_tokens=st.sampled_from([0, 8, 16]),
        sinks=st.sampled_from([0, 8]),
        ratio=st.sampled_from([0.05, 0.5, 1.0]),
        policy=st.sampled_from(["drop", "fetch"]),
        dense=st.sampled_from(["", "1"]),
        drafts=st.sampled_from([0, 1, 4, 7]),
        smoothing=st.sampled_from([0.0, 0.8]),
        seed=st.integers(0, 10_000),
        kv_dtype=KV_DTYPES,
    )
    def start(self, **options: Any) -> None:
        self.use_kernels()
        super().start(**options)

    def use_kernels(self) -> None:
        """The references."""

    def make_engine(self, setup: EngineSetup) -> Engine:
        streams = SerialStreams()
        attention = self.attention(AttentionSetup(setup.layout, 2 * HEADS, torch.float32, SCALE, CPU, streams))
        device = DeviceSetup(torch.device("cpu"), 2 * HEADS, torch.float32, 1 << 20, streams, attention)
        return DeviceEngine(setup, device)

    def attention(self, setup: AttentionSetup) -> DeviceAttention:
        return triton.make(setup)

    def padding(self, rows: int) -> int:
        return min(n for n in CAPTURED if n >= rows) - rows

    def check_attended(self, layer: int, plan: DecodePlan) -> None:
        """FlashInfer's page table names, head by head, the slots that the CPU attends to."""
        super().check_attended(layer, plan)
        rows = plan.step.rows
        resident, entries = self.tier.layers[layer], len(rows) + self.padding(len(rows))
        table = SlotTable(self.layout, resident.selected, self.engine.tables[0].current.rows)
        table.load(plan)
        width = resident.selected + resident.local
        pages = HeadPages(torch.full((entries * HEADS * width + 1,), -1).int(), torch.zeros(entries * HEADS).int())
        table.flatten_heads(entries, pages)
        _, slots, lengths, _ = plan.resident(resident.selected)
        expected: list[int] = []
        for i, (row, length) in enumerate(zip(rows.tolist(), lengths.tolist(), strict=True)):
            used = slots[i, : -(-length // BLOCK)].tolist()
            expected += [(row * HEADS + head) * width + slot for head in range(HEADS) for slot in used]
            assert (pages.last_page_len[i * HEADS : (i + 1) * HEADS] == (length - 1) % BLOCK + 1).all()
        padding = [head * width + resident.selected for head in range(HEADS)] * (entries - len(rows))
        assert pages.indices[: len(expected) + len(padding)].tolist() == expected + padding
        assert int(table.pages(entries).sum()) * HEADS == len(expected) + len(padding)


TestScheduleOnDevice = ScheduleOnDevice.TestCase
TestScheduleOnDevice.settings = settings(
    max_examples=60, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)


class NoAttention:
    def plan(self, *arguments: Any) -> None: ...

    def refresh(self, *arguments: Any) -> None: ...

    def run(self, query: Tensor, *arguments: Any) -> Tensor:
        return torch.zeros_like(query)


class ScheduleOnTriton(ScheduleOnDevice):
    """The same on the Triton kernels, interpreted."""

    def use_kernels(self) -> None:
        self.kernels_in_use = contextlib.ExitStack()
        self.kernels_in_use.enter_context(cuda_ops_on("cpu", self.cuda_kernels()))

    def cuda_kernels(self) -> Any:
        return None

    def attention(self, setup: AttentionSetup) -> DeviceAttention:
        """None: the interpreter is slow, and what attention computes is tested elsewhere."""
        return DeviceAttention(NoAttention(), NoAttention())

    def teardown(self) -> None:
        super().teardown()
        if hasattr(self, "kernels_in_use"):
            self.kernels_in_use.close()


class ScheduleOnCuda(ScheduleOnTriton):
    """The same with the CUDA C++ kernels, compiled for the CPU, where there are some."""

    def cuda_kernels(self) -> Any:
        return load()


TestScheduleOnTriton, TestScheduleOnCuda = ScheduleOnTriton.TestCase, ScheduleOnCuda.TestCase
# A failure is not shrunk: the interpreter is slow.
TestScheduleOnTriton.settings = settings(TestScheduleOnDevice.settings, max_examples=4, phases=[Phase.generate])
TestScheduleOnCuda.settings = settings(TestScheduleOnDevice.settings, max_examples=5, phases=[Phase.generate])


class Unchecked:
    """Leaves out what a schedule checks by itself; what it compares needs the background to be quiet."""

    def check_attended(self, layer: int, plan: DecodePlan) -> None: ...

    def follow(self, *args: Any, **kwargs: Any) -> None: ...

    def adopt(self, row: int) -> None: ...


class OnHost(Unchecked, Schedule):
    kernels = False


class Postponing(Unchecked, ScheduleOnDevice):
    """Leaves to the next step what a captured graph leaves to it."""

    def step_ends(self) -> None: ...


class Twins(RuleBasedStateMachine):
    """One schedule, on the host and on a device: whenever the device has nothing left over, both hold the same."""

    @initialize(
        budget_blocks=st.integers(2, 6),
        recent_tokens=st.sampled_from([0, 8, 16]),
        ratio=st.sampled_from([0.05, 0.5, 1.0]),
        policy=st.sampled_from(["drop", "drop", "drop", "fetch"]),
        dense=st.sampled_from(["", "", "1"]),
        drafts=st.sampled_from([0, 0, 1, 7]),
        smoothing=st.sampled_from([0.0, 0.8]),
        seed=st.integers(0, 10_000),
    )
    def start(self, **options: Any) -> None:
        self.twins = (OnHost(), Postponing())
        for twin in self.twins:
            twin.start(sinks=8, **options)

    @precondition(lambda self: self.twins[0].free_rows and len(self.twins[0].free_pages) > 20)
    @rule(length=st.integers(4 * BLOCK, 12 * BLOCK), chunks=st.integers(1, 2))
    def prefill(self, length: int, chunks: int) -> None:
        for twin in self.twins:
            twin.prefill(length, chunks)

    @precondition(lambda self: self.twins[0].live and len(self.twins[0].free_pages) > 2 * ROWS)
    @rule(data=st.data(), steps=st.integers(1, 6))
    def decode(self, data: st.DataObject, steps: int) -> None:
        live = self.twins[0].live
        rows = [row for row in live if data.draw(st.booleans())]
        for _ in range(steps):
            rows = [row for row in rows if live[row].length < CONTEXT]
            accepted = [data.draw(st.integers(0, self.twins[0].config.draft_tokens)) for _ in rows]
            if rows and len(self.twins[0].free_pages) > 2 * ROWS:
                for twin in self.twins:
                    twin.step(rows, accepted)

    @precondition(lambda self: self.twins[0].live)
    @rule(data=st.data(), silent=st.booleans())
    def finish(self, data: st.DataObject, silent: bool) -> None:
        """A request ends while the device may have work left over for it; its pages may be written at once."""
        row = data.draw(st.sampled_from(sorted(self.twins[0].live)))
        for twin in self.twins:
            twin.leave(row, silent)

    @rule()
    def hold_the_same(self) -> None:
        for twin in self.twins:
            twin.engine.settle()
        host, device = self.twins
        rows = sorted(host.live)
        for there, here in zip(host.tier.layers, device.tier.layers, strict=True):
            for name, held, mirrored in zip(there.maps._fields, there.maps, here.maps, strict=True):
                assert torch.equal(held[rows], mirrored[rows]), name
            if there.averages is not None:  # sums over another batch differ in the last bit
                torch.testing.assert_close(here.averages[rows], there.averages[rows])
            for row in rows:
                complete = host.live[row].length // BLOCK
                assert torch.equal(there.summaries[row, :, :complete], here.summaries[row, :, :complete])
        for pool in ("kv", "summaries"):
            for there, here in zip(getattr(host.host, pool), getattr(device.host, pool), strict=True):
                pages = [page for row in rows for page in host.live[row].pages[: host.live[row].length // BLOCK]]
                assert torch.equal(there[pages], here[pages])

    def teardown(self) -> None:
        for twin in getattr(self, "twins", ()):
            twin.teardown()


TestTwins = Twins.TestCase
TestTwins.settings = settings(TestScheduleOnDevice.settings, max_examples=200)


def test_a_step_of_another_shape_first_does_what_the_last_one_left_over() -> None:
    twins = Twins()
    twins.start(budget_blocks=2, recent_tokens=8, ratio=1.0, policy="drop", dense="", drafts=0, smoothing=0.8, seed=3)
    for _ in range(3):
        twins.prefill(10 * BLOCK, 1)
    rows = sorted(twins.twins[0].live)
    for decoding in (rows, rows[:1], rows[2:], rows):
        for twin in twins.twins:
            twin.step(decoding, [0] * len(decoding))
    twins.hold_the_same()
    twins.teardown()


def test_a_source_may_return_all_queries_of_a_step() -> None:
    SOURCES.register("everything")(lambda queries: queries)
    schedule = Postponing()
    schedule.source = "everything"
    schedule.start(budget_blocks=2, recent_tokens=8, sinks=8, ratio=1.0, policy="drop", dense="", drafts=4,
                   smoothing=0.8, seed=3)  # fmt: skip
    schedule.prefill(10 * BLOCK, 1)
    (row,) = schedule.live
    for _ in range(3):
        schedule.step([row], [2])
    assert schedule.engine.snapshot().pipeline.fetched > 0
    schedule.teardown()
