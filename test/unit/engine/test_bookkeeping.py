"""Random schedules of requests against the host engine: see `Schedule`, and what it must notice."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, settings
from torch import Tensor

from sglang_oasis.config import LookaheadKVConfig
from sglang_oasis.engine.batch import DecodeBatch
from sglang_oasis.engine.host import HostEngine
from sglang_oasis.engine.plan import DecodePlan
from sglang_oasis.tier.integrity import IntegrityError
from sglang_oasis.tier.layout import TierLayout
from sglang_oasis.tier.resident_tier import ResidentTier
from test.cases.schedule import BLOCK, CONTEXT, DIM, HEADS, LAYERS, Schedule


class ScheduleOnTorch(Schedule):
    """The same without the C++ kernels."""

    kernels = False


TestSchedule = Schedule.TestCase
TestScheduleOnTorch = ScheduleOnTorch.TestCase
TestSchedule.settings = settings(
    max_examples=100, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)
TestScheduleOnTorch.settings = settings(TestSchedule.settings, max_examples=40)  # it is six times as slow


def _built_tier(length: int = 10 * BLOCK + 3) -> tuple[Schedule, int]:
    schedule = Schedule()
    schedule.start(3, 8, 0, 1.0, "drop", "", drafts=0, smoothing=0.0, seed=7)
    schedule.prefill(length, 1)
    (row,) = schedule.live
    return schedule, row


@pytest.mark.parametrize(
    ("damage", "invariant"),
    [
        (lambda layer, row: layer.blocks[row, 0, 1].add_(1), "resident blocks mirror"),
        (lambda layer, row: layer.head_map[row, 0, :2].fill_(4), "slot_of inverts head_map"),
        (lambda layer, row: layer.slot_of[row, 1].fill_(0), "slot_of inverts head_map"),
        (lambda layer, row: layer.summaries[row, 0, 2].add_(1), "summaries mirror"),
        (lambda layer, row: layer.blocks[row, :, layer.local_slot(10)].zero_(), "local block 10"),
        (lambda layer, row: layer.head_map[row, 0, 0].fill_(-1), "slots are occupied"),
    ],
)
def test_integrity_check_notices_every_kind_of_damage(damage, invariant) -> None:  # type: ignore[no-untyped-def]
    schedule, row = _built_tier()
    schedule.tiers_agree()
    damage(schedule.tier.layers[1], row)
    with pytest.raises(IntegrityError, match=invariant):
        schedule.tiers_agree()
    schedule.teardown()


def test_a_reused_row_does_not_serve_its_previous_request() -> None:
    schedule, row = _built_tier()
    old = schedule.live.pop(row)
    schedule.free_rows.append(row)
    batch = DecodeBatch(torch.tensor([row]), torch.tensor([old.generation + 1]), torch.tensor([old.length + 1]))
    (plan,) = schedule.engine.begin_decode(batch).plans
    assert [cold.row for cold in plan.cold] == [row]
    schedule.teardown()


class HeldBlocksAreNoLocalOnes:
    def record(self, layer: int, plan: DecodePlan, tier: ResidentTier) -> None:
        held = tier.layers[layer].head_map[plan.step.rows]
        assert (held < plan.step.windows.first_local[:, None, None]).all(), plan.step.number


def test_a_row_that_decodes_twice_at_one_length_attends_to_each_block_once() -> None:
    """What was looked ahead for the next length may be local at this one."""
    schedule, row = _built_tier(11 * BLOCK - 1)
    schedule.engine.close()
    schedule.engine = HostEngine(schedule.setup, moves_on=False)
    schedule.engine.observer = HeldBlocksAreNoLocalOnes()
    length = torch.tensor([11 * BLOCK])
    written = schedule.req_to_token[row, length - 1].long()
    for _ in range(6):
        forward = schedule.engine.begin_decode(
            DecodeBatch(torch.tensor([row]), torch.tensor([schedule.live[row].generation]), length)
        )
        for layer in range(LAYERS):
            query, token = schedule.random(1, 2 * HEADS, DIM), schedule.random(1, HEADS, DIM)
            schedule.engine.decode_layer(forward, layer, query, token, token, written)
        schedule.engine.settle()
    schedule.teardown()


def test_draft_tokens_are_overwritten_and_never_summarised() -> None:
    """Tokens beyond the committed length land in local slots; the next commit overwrites them; no summary sees them."""
    config = LookaheadKVConfig.from_flags(
        {"lookahead_kv_budget_tokens": 2 * BLOCK, "lookahead_kv_sink_tokens": 0}, BLOCK
    )
    layout = TierLayout.of(
        config,
        num_layers=1,
        kv_heads=HEADS,
        head_dim=DIM,
        dtype=torch.float32,
        context_length=CONTEXT,
        draft_tokens=BLOCK + 1,
    )
    tier = ResidentTier(layout, 2, torch.device("cpu"))
    layer = tier.layers[0]

    def places(positions: Tensor) -> Tensor:
        return layer.local_slot(positions // BLOCK) * BLOCK + positions % BLOCK

    row, committed = torch.tensor([1]), BLOCK * 3 - 2
    for length in range(committed, committed + 2 * BLOCK):
        local = range(tier.window(length).first_local, tier.window(length).open_block + 1)
        before = layer.blocks[1, :, [layer.local_slot(b) for b in local]].clone()
        draft_positions = torch.arange(length, length + BLOCK + 1)
        drafts = torch.full((BLOCK + 1, HEADS, DIM), float("nan"))
        layer.write_tokens(row.repeat(BLOCK + 1), places(draft_positions), drafts, drafts)
        after = layer.blocks[1, :, [layer.local_slot(b) for b in local]]
        fill = tier.window(length).open_fill
        assert not after[:, :-1].isnan().any()
        assert torch.equal(after[:, -1, :, :fill], before[:, -1, :, :fill])
        token = torch.full((1, HEADS, DIM), float(length))
        layer.write_tokens(row, places(torch.tensor([length])), token, token)
        slot = layer.local_slot(length // BLOCK)
        assert (layer.blocks[1, :, slot, :, length % BLOCK] == length).all()
    assert not layer.summaries.any()
