"""What the benchmarks compute from what they measure."""

from __future__ import annotations

import pytest

from benchmark.token_times import decoding


def test_decode_throughput_is_that_of_the_requests_which_decode_together() -> None:
    """Two requests decode side by side, 0.1 s a token; then one of them waits a second for the other one's prefill."""
    running, throughput = decoding([1.0, 1.0], [[0.1] * 9 + [1.0], [0.1] * 9])
    assert running == 2
    assert throughput == pytest.approx(20)


def test_a_request_that_decodes_alone_counts_alone() -> None:
    running, throughput = decoding([1.0, 9.0], [[0.1] * 5, [0.1] * 5])
    assert running == 1
    assert throughput == pytest.approx(10)
