"""The audit's recall against plain loops over tokens."""

from __future__ import annotations

import logging
import math
import os
import threading
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_oasis.config import LookaheadKVConfig
from sglang_oasis.lookahead.audit import Audit, LayerRecall, Recall, measure_recall
from sglang_oasis.lookahead.step import DecodeStep
from sglang_oasis.tier.host_pool import HostPool
from sglang_oasis.tier.layout import TierLayout
from sglang_oasis.tier.resident_tier import ResidentTier

PAGES = torch.arange(1, 9)
"""Host pages of the audited row."""


@settings(max_examples=50, deadline=None)
@given(
    heads=st.integers(1, 3),
    group=st.integers(1, 3),
    blocks=st.integers(4, 9),
    last=st.integers(1, 8),
    seed=st.integers(0, 10_000),
)
def test_recall_is_what_loops_over_tokens_find(heads: int, group: int, blocks: int, last: int, seed: int) -> None:
    size, dim, selected, scale = 8, 16, 2, 0.3
    rng = torch.Generator().manual_seed(seed)
    query = torch.randn((heads * group, dim), generator=rng)
    keys = torch.randn((blocks, heads, size, dim), generator=rng)
    length, first_local = (blocks - 1) * size + last, blocks - 2
    keys[-1, :, last:] = float("nan")  # nobody may read these
    resident = torch.stack([torch.randperm(first_local, generator=rng)[:selected] for _ in range(heads)]).int()

    agreements, masses = [], []
    for head in range(heads):
        mass = [0.0] * blocks
        for vector in query[head * group : (head + 1) * group]:
            weights = [
                math.exp(scale * float(vector @ keys[token // size, head, token % size])) for token in range(length)
            ]
            for token, weight in enumerate(weights):
                mass[token // size] += weight / sum(weights) / group
        best = sorted(range(first_local), key=lambda block: -mass[block])[:selected]
        held = {*resident[head].tolist(), *range(first_local, blocks)}
        agreements.append(len(held & set(best)) / selected)
        masses.append(sum(mass[block] for block in held))

    found = measure_recall(query, keys, length, resident, first_local, scale)
    assert math.isclose(found.agreement, sum(agreements) / heads, abs_tol=1e-6)
    assert math.isclose(found.mass, sum(masses) / heads, abs_tol=1e-4)


def test_a_layers_mean_follows_and_its_worst_stays() -> None:
    layer = LayerRecall()
    for mass in (0.5, *[0.9] * 200):
        layer.add(Recall(1.0, mass))
    assert layer.mass is not None
    assert abs(layer.mass - 0.9) < 1e-3
    assert (layer.agreement, layer.worst_mass) == (1.0, 0.5)


class Audited:
    """An audit of every step of one row, in all of its two layers.

    Args:
        pages_of: what SGLang says of the row's pages, in the audit's thread.
    """

    def __init__(self, pages_of: Callable[[], torch.Tensor] = lambda: PAGES) -> None:
        config = LookaheadKVConfig.from_flags({"lookahead_kv_budget_tokens": 32, "lookahead_kv_sink_tokens": 0})
        layout = TierLayout.of(
            config, num_layers=2, kv_heads=2, head_dim=16, dtype=torch.float32, context_length=len(PAGES) * 16
        )
        self.tier = ResidentTier(layout, 2, torch.device("cpu"))
        self.tier.rows.claim(1, 5, len(PAGES) * 16)
        for layer in self.tier.layers:
            layer.head_map[:] = torch.arange(layer.selected)
        host = HostPool(
            num_pages=len(PAGES) + 1,
            num_layers=2,
            kv_heads=2,
            block_size=16,
            head_dim=16,
            dtype=torch.float32,
            summary_format=None,
        )
        self.audit = Audit(self.tier, host, 1, lambda row, blocks: pages_of()[:blocks])

    def step(self) -> None:
        windows = self.tier.windows(torch.tensor([len(PAGES) * 16]))
        step = DecodeStep(1, torch.tensor([1]), windows, windows, PAGES[None].int())
        self.audit.begin(step)
        for layer in range(2):
            self.audit.observe(layer, step, torch.ones((1, 4, 16)), 1.0)

    def found(self, steps: int = 1) -> tuple[int, int]:
        """Audits done and layers seen, after so many steps."""
        for _ in range(steps):
            self.step()
            if self.audit._running is not None:
                self.audit._running.result()
        return self.audit.audits, sum(layer.mass is not None for layer in self.audit.layers)


def test_a_row_is_looked_at_in_its_layers() -> None:
    audited = Audited()
    assert audited.found(steps=3) == (3, 2)
    audited.audit.close()


def test_while_an_audit_runs_none_is_begun_and_only_what_is_done_counts() -> None:
    may_go_on = threading.Event()

    def pages_of() -> torch.Tensor:
        assert may_go_on.wait(10)
        return PAGES

    audited = Audited(pages_of)
    for _ in range(20):
        audited.step()
    assert audited.audit.audits == 0
    may_go_on.set()
    audited.audit.close()
    assert audited.audit.audits == 1


def test_what_was_seen_in_pages_that_changed_hands_does_not_count() -> None:
    """Another page in the request's own row, and another request in the row."""
    assert Audited(lambda: PAGES.flip(0)).found() == (0, 0)
    may_go_on = threading.Event()
    taken = Audited()
    taken.audit._thread.submit(may_go_on.wait, 10)  # the audit waits behind it
    taken.step()
    taken.tier.rows.claim(1, 6, 10)
    may_go_on.set()
    taken.audit.close()
    assert taken.audit.audits == 0


def test_a_failure_is_logged_once_per_kind_and_ends_nothing(caplog: pytest.LogCaptureFixture) -> None:
    failures: list[Exception] = [ValueError("one"), ValueError("two"), KeyError("three")]

    def pages_of() -> torch.Tensor:
        if failures:
            raise failures.pop(0)
        return PAGES

    with caplog.at_level(logging.ERROR):
        assert Audited(pages_of).found(steps=4) == (1, 2)
    assert [record.exc_info[0] for record in caplog.records if record.exc_info] == [ValueError, KeyError]


@pytest.mark.skipif(not hasattr(os, "SCHED_IDLE"), reason="Linux only")
def test_the_thread_takes_idle_cores_only() -> None:
    policies: list[int] = []

    def pages_of() -> torch.Tensor:
        policies.append(os.sched_getscheduler(0))
        return PAGES

    Audited(pages_of).found()
    assert set(policies) == {os.SCHED_IDLE}
    assert os.sched_getscheduler(0) != os.SCHED_IDLE, "nobody else does"
