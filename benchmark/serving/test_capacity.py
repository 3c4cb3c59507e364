"""At least 4R requests decode concurrently in the device bytes of R dense requests (on four layers of the model)."""

from __future__ import annotations

import pytest

from benchmark.serving.capacity import Workload, measure

pytestmark = pytest.mark.e2e


def test_four_times_as_many_requests_decode_in_the_same_bytes() -> None:
    workload = Workload(layers=4, dense_requests=2, clients=9)
    outcomes = measure(workload)
    assert outcomes["stock"].running == workload.dense_requests
    assert outcomes["lookahead"].running >= 4 * workload.dense_requests
    assert outcomes["lookahead"].device_bytes <= workload.device_bytes
    assert all(outcome.finished == outcome.clients for outcome in outcomes.values())
