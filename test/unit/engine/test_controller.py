"""Order within a layer: what may touch its memory, and when."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from sglang_oasis.config import LookaheadKVConfig
from sglang_oasis.engine.plan import DecodePlan, plan_decode, plan_prefill
from sglang_oasis.lookahead.controller import LookaheadController
from sglang_oasis.lookahead.selectors.bound import BoundSelector, register_selector
from sglang_oasis.ops.summary import SummaryFormat
from sglang_oasis.tier.host_pool import HostPool
from sglang_oasis.tier.layout import TierLayout
from sglang_oasis.tier.resident_tier import ResidentTier

BLOCK, HEADS, DIM, LENGTH = 8, 1, 4, 100


class Rig:
    """One row past its budget, in two layers, and a selector that waits for a signal."""

    def __init__(self) -> None:
        torch.manual_seed(5)  # with which the prediction differs from what is resident
        self.release = threading.Event()
        self.release.set()
        self.entered = threading.Event()

        @register_selector("gated")
        def gated(queries: Tensor, records: Tensor, fmt: SummaryFormat, candidates: Tensor, scale: float) -> Tensor:
            self.entered.set()
            assert self.release.wait(10)
            return BoundSelector(1.0)(queries, records, fmt, candidates, scale)

        config = LookaheadKVConfig.from_flags(
            {
                "lookahead_kv_budget_tokens": 3 * BLOCK,
                "lookahead_kv_fetch_ratio": 1.0,
                "lookahead_kv_selector": "gated",
                "lookahead_kv_sink_tokens": 0,
            },
            BLOCK,
        )
        layout = TierLayout.of(
            config, num_layers=2, kv_heads=HEADS, head_dim=DIM, dtype=torch.float32, context_length=2 * LENGTH
        )
        self.host = HostPool(
            num_pages=40,
            num_layers=2,
            kv_heads=HEADS,
            block_size=BLOCK,
            head_dim=DIM,
            dtype=torch.float32,
            summary_format=layout.summary_format,
        )
        self.tier = ResidentTier(layout, 2, torch.device("cpu"))
        self.controller = LookaheadController(config, self.tier, self.host)
        self.req_to_token = torch.zeros((2, 2 * LENGTH), dtype=torch.int32)
        self.req_to_token[1] = torch.arange(2 * LENGTH) + BLOCK
        plan = plan_prefill(
            self.tier,
            rows=[1],
            generations=[1],
            prefixes=[0],
            new_tokens=[LENGTH],
            last_chunks=[True],
            req_to_token=self.req_to_token,
        )
        (request,) = plan.requests
        for layer in range(2):
            keys, values = torch.randn(2, LENGTH, HEADS, DIM)
            self.controller.write_through(layer, self.req_to_token[1, :LENGTH], keys, values)
            self.host.summarise(layer, plan.completed_pages)
            self.controller.build(layer, 1, request.window, request.pages, torch.randn(4, HEADS, DIM), 1.0)

    def plan(self, number: int) -> DecodePlan:
        (plan,) = plan_decode(
            self.tier,
            number=number,
            rows=torch.tensor([1]),
            generations=torch.tensor([1]),
            lengths=torch.tensor([LENGTH + number]),
            rids=[],
            req_to_token=self.req_to_token,
        )
        return plan

    def look_ahead(self) -> None:
        """Leave a prediction of layer 0 hanging in the background."""
        token = torch.randn(1, HEADS, DIM)
        plan = self.plan(1)
        self.controller.write_through(0, self.req_to_token[1, LENGTH : LENGTH + 1], token, token)
        self.controller.prepare(0, plan.step, token, token, token, 1.0)
        self.release.clear()
        self.entered.clear()
        self.controller.look_ahead(0, plan.step, token, 1.0)
        assert self.entered.wait(10)


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig()
    yield made
    made.release.set()
    made.controller.close()


def test_host_pages_of_a_layer_are_not_written_while_its_transfer_may_still_read_them(rig: Rig) -> None:
    """SGLang may free a page after the step that planned to fetch it, and hand it to the next prefill."""
    rig.look_ahead()
    page_of_another = torch.arange(BLOCK, 2 * BLOCK)
    before = rig.host.read(0, page_of_another).clone()
    writer = threading.Thread(
        target=rig.controller.write_through,
        args=(0, page_of_another, torch.zeros(BLOCK, HEADS, DIM), torch.zeros(BLOCK, HEADS, DIM)),
    )
    writer.start()
    time.sleep(0.1)
    assert torch.equal(rig.host.read(0, page_of_another), before)
    rig.release.set()
    writer.join(10)
    assert not rig.host.read(0, page_of_another).any()


def test_another_layer_goes_on_meanwhile(rig: Rig) -> None:
    rig.look_ahead()
    rig.controller.write_through(1, torch.arange(BLOCK), torch.zeros(BLOCK, HEADS, DIM), torch.zeros(BLOCK, HEADS, DIM))
    assert not rig.release.is_set()


def test_the_prediction_is_there_when_the_next_step_attends(rig: Rig) -> None:
    rig.look_ahead()
    before, earlier = rig.tier.layers[0].head_map[1].clone(), rig.controller.pipeline.statistics()
    threading.Timer(0.05, rig.release.set).start()
    token = torch.randn(1, HEADS, DIM)
    rig.controller.write_through(0, rig.req_to_token[1, LENGTH + 1 : LENGTH + 2], token, token)
    assert rig.controller.pipeline.statistics().stalls == 1
    assert not torch.equal(rig.tier.layers[0].head_map[1], before)
    assert rig.controller.pipeline.statistics().seconds["transfer"] > earlier.seconds["transfer"]
