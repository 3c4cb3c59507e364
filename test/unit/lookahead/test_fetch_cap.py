"""The adaptive cap against a link and a model whose speeds are known."""

from __future__ import annotations

from sglang_oasis.config import DEFAULT_FETCH_RATIO
from sglang_oasis.lookahead.fetch_cap import AdaptiveCap, FixedCap
from sglang_oasis.lookahead.pipelines.base import PipelineStatistics
from sglang_oasis.tier.layout import fetch_cap

SELECTED, HEADS, CHUNK = 128, 90, 4096
STEP = 0.04
LEAST = fetch_cap(DEFAULT_FETCH_RATIO, SELECTED)


class Machine:
    """Steps of STEP seconds while a link fetches what is missing, up to the cap; waits when that takes longer.

    Args:
        rate: of the link, bytes per second.
        late: seconds of prediction that each step waits for before it waits for its transfers, on a busy processor.
    """

    def __init__(self, rate: float, late: float = 0.0) -> None:
        self.rate, self.late = rate, late
        self.predicting = 0.0
        self.now = self.transfer = self.stalled = 0.0
        self.fetched = self.deferred = 0
        self.cap = AdaptiveCap(self.statistics, SELECTED, HEADS, CHUNK, 1, lambda: self.now)

    def statistics(self) -> PipelineStatistics:
        seconds = {"predict": self.predicting, "select": 0.0, "transfer": self.transfer}
        return PipelineStatistics(self.fetched, self.deferred, 0, self.stalled, seconds)

    def run(self, steps: int, missing: int, rows: int = 1, idle: int = 0) -> float:
        """`missing` blocks want in each step, per head of all rows but `idle`; returns the part of the time waited."""
        begun, stalled = self.now, self.stalled
        for _ in range(steps):
            self.cap.begin_step(rows)
            fetched = min(missing, self.cap.blocks(SELECTED))
            heads = HEADS * (rows - idle)
            transfer = fetched * heads * CHUNK / self.rate
            self.fetched += fetched * heads
            self.deferred += (missing - fetched) * heads
            self.transfer += transfer
            waited = self.late + transfer if self.late else max(0.0, transfer - STEP)
            self.predicting += self.late
            self.stalled += waited
            self.now += STEP + waited
        return (self.stalled - stalled) / (self.now - begun)


def test_a_fixed_cap_is_a_share_of_the_budget() -> None:
    assert [FixedCap(0.05).blocks(128), FixedCap(0.05).blocks(4), FixedCap(1.0).blocks(64)] == [6, 1, 64]


def test_it_stays_small_while_little_is_missing() -> None:
    machine = Machine(rate=5e9)
    machine.run(50, missing=2)
    assert machine.cap.blocks(SELECTED) == LEAST


def test_it_grows_while_the_working_set_is_stale_and_shrinks_when_it_is_not() -> None:
    machine = Machine(rate=5e9)
    machine.run(20, missing=100)
    assert machine.cap.blocks(SELECTED) >= 100
    machine.run(100, missing=0)
    assert machine.cap.blocks(SELECTED) == LEAST


def test_what_the_link_moves_in_a_step_bounds_it() -> None:
    machine = Machine(rate=1e9)
    machine.run(50, missing=SELECTED)
    most = 1e9 * STEP / CHUNK / HEADS
    assert 0.3 * most < machine.cap.blocks(SELECTED) < most
    machine.run(50, missing=SELECTED, rows=8)
    assert machine.cap.blocks(SELECTED) < most / 8


def test_a_row_may_use_what_the_others_do_not() -> None:
    machine = Machine(rate=1e9)
    machine.run(50, missing=SELECTED, rows=8)
    shared = machine.cap.blocks(SELECTED)
    machine.run(50, missing=SELECTED, rows=8, idle=7)
    assert machine.cap.blocks(SELECTED) > 4 * shared
    assert machine.run(50, missing=SELECTED, rows=8, idle=7) < 0.05


def test_a_slow_link_stalls_little_and_a_fast_one_is_used_again() -> None:
    machine = Machine(rate=1e9)
    machine.run(50, missing=40, rows=2)
    before = machine.cap.blocks(SELECTED)
    machine.rate /= 10
    machine.run(30, missing=40, rows=2)  # finds out
    assert machine.run(100, missing=40, rows=2) < 0.05
    assert machine.cap.blocks(SELECTED) < before / 3
    machine.rate *= 10
    machine.run(100, missing=40, rows=2)
    assert machine.cap.blocks(SELECTED) >= before


def test_a_pause_leaves_the_link_no_more_time() -> None:
    machine = Machine(rate=1e8)
    machine.run(50, missing=40)
    before = machine.cap.blocks(SELECTED)
    machine.now += 300
    machine.run(1, missing=40)
    assert machine.cap.blocks(SELECTED) <= before + 1


def test_waiting_for_predictions_is_not_blamed_on_the_link() -> None:
    machine = Machine(rate=5e9, late=STEP / 4)
    machine.run(50, missing=2 * LEAST)
    assert machine.cap.blocks(SELECTED) > LEAST


def test_a_link_that_was_too_slow_for_one_block_is_used_again_as_soon_as_another() -> None:
    machine = Machine(rate=1e6)
    machine.run(500, missing=40)
    assert machine.cap.blocks(SELECTED) == 1
    machine.rate = 5e9
    machine.run(60, missing=40)
    assert machine.cap.blocks(SELECTED) > 30


def test_a_layer_never_gets_more_than_it_has_slots_nor_less_than_one() -> None:
    machine = Machine(rate=1e3)
    machine.run(20, missing=SELECTED)
    assert machine.cap.blocks(SELECTED) == 1
    assert Machine(rate=1e12).cap.blocks(2) == 2
