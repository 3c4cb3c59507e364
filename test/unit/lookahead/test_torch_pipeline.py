"""The pipeline on plain torch: one task after the other beside the caller, waiting that is local to a layer."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from sglang_oasis.lookahead.pipelines.base import PredictionStep
from sglang_oasis.lookahead.pipelines.torch_ops import TorchPipeline
from sglang_oasis.lookahead.selectors import BoundSelector
from sglang_oasis.ops.summary import SUMMARY_FORMATS, SummaryFormat
from sglang_oasis.tier.host_pool import HostPool
from sglang_oasis.tier.layout import TierLayout
from sglang_oasis.tier.resident_tier import ResidentTier

PATIENCE = 10.0
LAYERS, BLOCKS, SELECTED, BLOCK, DIM = 2, 6, 3, 8, 4
FORMAT = SUMMARY_FORMATS["bf16"]


class Gate:
    """A selector that waits for a signal, per task, and may fail."""

    def __init__(self) -> None:
        self.entered, self.release = threading.Event(), threading.Event()
        self.threads: list[threading.Thread] = []
        self.fails = False

    def __call__(
        self, queries: Tensor, records: Tensor, fmt: SummaryFormat, candidates: Tensor, scale: float
    ) -> Tensor:
        self.threads.append(threading.current_thread())
        self.entered.set()
        assert self.release.wait(PATIENCE)
        if self.fails:
            raise ZeroDivisionError("in the background")
        return BoundSelector(1.0)(queries, records, fmt, candidates, scale)


class Rig:
    """One row past its budget, in two layers."""

    def __init__(self) -> None:
        layout = TierLayout(
            num_layers=LAYERS, kv_heads=1, head_dim=DIM, dtype=torch.float32, block_size=BLOCK,
            selected_blocks=(SELECTED,) * LAYERS, recent_blocks=1, sink_blocks=0, max_blocks=BLOCKS + 2,
            summary_format=FORMAT, draft_tokens=0, smoothed=False,
        )  # fmt: skip
        self.tier = ResidentTier(layout, 2, torch.device("cpu"))
        host = HostPool(
            num_pages=BLOCKS + 3, num_layers=LAYERS, kv_heads=1, block_size=BLOCK, head_dim=DIM, dtype=torch.float32,
            summary_format=FORMAT,
        )  # fmt: skip
        pages = torch.arange(1, BLOCKS + 3)
        for layer, kv in enumerate(host.kv):
            kv.normal_()
            host.summarise(layer, pages)
            resident = self.tier.layers[layer]
            resident.summaries[1, :, : BLOCKS + 2] = host.summaries[layer][pages].transpose(0, 1)
            resident.build(1, torch.arange(SELECTED)[None], self.tier.window((BLOCKS + 1) * BLOCK), kv, pages)
        self.gate = Gate()
        self.pipeline = TorchPipeline(self.tier, host, self.gate)
        self.step = PredictionStep(3, torch.tensor([0]), torch.tensor([1]), torch.tensor([BLOCKS]), pages[None].int())
        self.pipeline.begin_step(self.step)
        self.pipeline.begin_urgent(self.step)

    def submit(self, layer: int) -> None:
        self.pipeline.submit(layer, torch.randn(1, 1, 1, DIM), 1.0, SELECTED)


@pytest.fixture
def rig() -> Iterator[Rig]:
    torch.manual_seed(3)
    made = Rig()
    yield made
    made.gate.release.set()
    made.pipeline.close()


def test_a_task_runs_beside_the_caller_and_is_through_when_it_was_waited_for(rig: Rig) -> None:
    before = rig.tier.layers[0].head_map[1].clone()
    rig.submit(0)
    assert rig.gate.entered.wait(PATIENCE)
    assert torch.equal(rig.tier.layers[0].head_map[1], before)
    rig.gate.release.set()
    rig.pipeline.wait(0)
    assert not torch.equal(rig.tier.layers[0].head_map[1], before)
    assert rig.gate.threads != [threading.current_thread()]
    statistics = rig.pipeline.statistics()
    assert statistics.fetched > 0
    assert min(statistics.seconds.values()) > 0


def test_waiting_for_a_layer_does_not_wait_for_another(rig: Rig) -> None:
    """Layer 0 has no task; layer 1's cannot end before the signal, which comes only after the wait."""
    rig.submit(1)
    assert rig.gate.entered.wait(PATIENCE)
    begun = time.monotonic()
    rig.pipeline.wait(0)
    assert time.monotonic() - begun < PATIENCE / 2, "it waited for layer 1, which waits for the signal"
    assert rig.pipeline.statistics().stalls == 0
    assert not rig.gate.release.is_set()


def test_a_blocked_wait_counts_as_a_stall_and_a_finished_task_does_not(rig: Rig) -> None:
    rig.submit(0)
    assert rig.gate.entered.wait(PATIENCE)
    threading.Timer(0.05, rig.gate.release.set).start()
    rig.pipeline.wait(0)
    assert rig.pipeline.statistics().stalls == 1
    assert rig.pipeline.statistics().stall_seconds > 0.01
    rig.submit(0)
    rig.pipeline.close()
    rig.pipeline.wait(0)
    assert rig.pipeline.statistics().stalls == 1


def test_what_is_run_at_once_is_run_by_the_caller(rig: Rig) -> None:
    rig.gate.release.set()
    fetched = rig.pipeline.run(0, torch.randn(1, 1, 1, DIM), 1.0, SELECTED)
    assert rig.gate.threads == [threading.current_thread()]
    assert fetched == rig.pipeline.statistics().fetched > 0


def test_an_error_reaches_the_one_who_waits(rig: Rig) -> None:
    rig.gate.fails = True
    rig.gate.release.set()
    rig.submit(0)
    with pytest.raises(ZeroDivisionError, match="in the background"):
        rig.pipeline.wait(0)
    rig.pipeline.wait(0)


def test_a_layer_takes_no_second_task_before_the_first_was_waited_for(rig: Rig) -> None:
    rig.submit(0)
    with pytest.raises(RuntimeError, match="not waited for"):
        rig.submit(0)
