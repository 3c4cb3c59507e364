"""Order within a layer: what may touch its memory, and when."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence

import pytest
import torch
from torch import Tensor

from sglang_oasis.config import LookaheadKVConfig
from sglang_oasis.engine.base import DecodeForward, EngineSetup
from sglang_oasis.engine.batch import DecodeBatch, PrefillBatch
from sglang_oasis.engine.host import HostEngine
from sglang_oasis.engine.plan import DecodePlan
from sglang_oasis.lookahead.selectors import SELECTORS, BoundSelector
from sglang_oasis.ops.summary import SummaryFormat
from sglang_oasis.tier.host_pool import HostPool
from sglang_oasis.tier.layout import TierLayout
from sglang_oasis.tier.resident_tier import ResidentTier

BLOCK, HEADS, DIM, LENGTH = 8, 1, 4, 100


class Rig:
    """One row past its budget, in two layers, and a selector that waits for a signal."""

    def __init__(self) -> None:
        torch.manual_seed(6)  # with which the prediction differs from what is resident
        self.release = threading.Event()
        self.release.set()
        self.entered = threading.Event()

        @SELECTORS.register("gated")
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
        self.req_to_token = torch.zeros((2, 2 * LENGTH), dtype=torch.int32)
        self.req_to_token[1] = torch.arange(2 * LENGTH) + BLOCK
        self.engine = HostEngine(EngineSetup(config, layout, self.host, 2, self.req_to_token, [1.0, 1.0]))
        self.prefill(1, self.req_to_token[1, :LENGTH].long())

    def prefill(self, generation: int, indices: Tensor, layers: Sequence[int] = (0, 1)) -> None:
        """A prompt that fills KV indices."""
        count = len(indices)
        forward = self.engine.begin_prefill(PrefillBatch([1], [generation], [0], [count], [True], indices))
        for layer in layers:
            query, key, value = torch.randn(3, count, HEADS, DIM)
            self.engine.prefill_layer(forward, layer, query, key, value)

    def begin(self, number: int) -> DecodeForward:
        return self.engine.begin_decode(
            DecodeBatch(torch.tensor([1]), torch.tensor([1]), torch.tensor([LENGTH + number]))
        )

    def decode_layer(self, forward: DecodeForward, layer: int, number: int) -> None:
        token = torch.randn(1, HEADS, DIM)
        written = self.req_to_token[1, LENGTH + number - 1 : LENGTH + number].long()
        self.engine.decode_layer(forward, layer, token, token, token, written)

    def look_ahead(self) -> None:
        """Leave a prediction of layer 0 hanging in the background."""
        self.release.clear()
        self.entered.clear()
        self.decode_layer(self.begin(1), 0, 1)
        assert self.entered.wait(10)


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig()
    yield made
    made.release.set()
    made.engine.close()


def test_host_pages_of_a_layer_are_not_written_while_its_transfer_may_still_read_them(rig: Rig) -> None:
    """SGLang may free a page after the step that planned to fetch it, and hand it to the next prefill."""
    rig.look_ahead()
    page_of_another = torch.arange(BLOCK, 2 * BLOCK)
    before = rig.host.read(0, page_of_another).clone()
    rig.engine.tier.rows.release(1)
    writer = threading.Thread(target=rig.prefill, args=(2, page_of_another, [0]))
    writer.start()
    time.sleep(0.1)
    assert torch.equal(rig.host.read(0, page_of_another), before)
    rig.release.set()
    writer.join(10)
    assert not torch.equal(rig.host.read(0, page_of_another), before)


def test_another_layer_goes_on_meanwhile(rig: Rig) -> None:
    forward = rig.begin(1)
    rig.release.clear()
    rig.entered.clear()
    rig.decode_layer(forward, 0, 1)
    assert rig.entered.wait(10)
    before = rig.host.read(1, rig.req_to_token[1, LENGTH : LENGTH + 1].long()).clone()
    rig.decode_layer(forward, 1, 1)
    assert not rig.release.is_set()
    assert not torch.equal(rig.host.read(1, rig.req_to_token[1, LENGTH : LENGTH + 1].long()), before)


def test_the_prediction_is_there_when_the_next_step_attends(rig: Rig) -> None:
    rig.look_ahead()
    tier, pipeline = rig.engine.tier, rig.engine.pipeline
    before, earlier = tier.layers[0].head_map[1].clone(), pipeline.statistics()
    seen = []

    class Attending:
        def record(self, layer: int, plan: DecodePlan, tier: ResidentTier) -> None:
            seen.append(tier.layers[0].head_map[1].clone())

    rig.engine.observer = Attending()
    threading.Timer(0.05, rig.release.set).start()
    rig.decode_layer(rig.begin(2), 0, 2)
    assert pipeline.statistics().stalls == 1
    assert not torch.equal(seen[0], before)
    assert pipeline.statistics().seconds["transfer"] > earlier.seconds["transfer"]
