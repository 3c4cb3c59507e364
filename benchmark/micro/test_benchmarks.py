"""What the benchmarks compute from their measurements."""

from __future__ import annotations

from itertools import product

import pytest

from benchmark.micro.control import PHASES, Setup, measure
from benchmark.micro.stack import Shape
from benchmark.serving.token_times import decoding
from sglang_oasis.kernels.cpu import native


def test_decode_throughput_is_that_of_the_requests_which_decode_together() -> None:
    """Two requests decode side by side, 0.1 s a token; then one of them waits a second for the other one's prefill."""
    running, throughput = decoding([1.0, 1.0], [[0.1] * 9 + [1.0], [0.1] * 9])
    assert running == 2
    assert throughput == pytest.approx(20)


def test_a_request_that_decodes_alone_counts_alone() -> None:
    running, throughput = decoding([1.0, 9.0], [[0.1] * 5, [0.1] * 5])
    assert running == 1
    assert throughput == pytest.approx(10)


def test_control_measures_all_phases_and_the_audit() -> None:
    assert native.load() is not None
    shape = Shape(layers=3, kv_heads=1, group=2, hidden=32, mlp=32, vocabulary=64, batch=2, context=512, budget=128)
    setup = Setup(shape, warm_up=4, phase=16, finding_out=4, pairs=2, block=32)
    record, _ = measure(setup)
    phases = record["phases"]
    assert [(phase["ratio"], phase["phase"]) for phase in phases] == [*product(("auto", "0.05", "1"), PHASES)]
    assert all(min(phase["fetched"], phase["milliseconds"], phase["link"]) > 0 for phase in phases)
    assert record["audit"]["audits"] == 2
    assert len(record["audit"]["ratios"]) == 2
