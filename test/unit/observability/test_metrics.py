"""Prometheus shows the numbers of the statistics, counters never twice."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import prometheus_client
import pytest

from sglang_oasis.observability.metrics import PREFIX, MetricsExporter


def snapshot(fetched: int, active: int, recall: dict[str, Any] | None = None) -> dict[str, Any]:
    return {
        "rows": {"capacity": 4, "active": active},
        "host_tokens": {"capacity": 100, "used": 7},
        "bytes": {"resident": 640},
        "fetch_cap": 6,
        "counters": {"blocks_fetched": fetched},
        "seconds": {"stall": 0.5},
        "step_seconds": {"model": 0.25},
        "recall": recall,
    }


def value(name: str) -> float | None:
    return prometheus_client.REGISTRY.get_sample_value(PREFIX + name, {"model_name": "m"})


@pytest.fixture
def exporter() -> Iterator[MetricsExporter]:
    """Its metrics are gone afterwards: Prometheus has one registry per process."""
    registry = prometheus_client.REGISTRY
    before = set(registry._collector_to_names)
    yield MetricsExporter({"model_name": "m"})
    for collector in set(registry._collector_to_names) - before:
        registry.unregister(collector)


def test_counters_follow_the_statistics_and_gauges_replace_each_other(exporter: MetricsExporter) -> None:
    assert exporter.due()
    exporter.publish(snapshot(fetched=5, active=3))
    assert not exporter.due()
    exporter.publish(snapshot(fetched=9, active=0))
    assert value("blocks_fetched_total") == 9
    assert value("stall_seconds_total") == 0.5
    assert value("step_model_seconds_total") == 0.25
    assert value("rows_active") == 0
    assert value("rows_capacity") == 4
    assert value("host_tokens_used") == 7
    assert value("resident_bytes") == 640
    assert value("fetch_cap") == 6


def test_recall_shows_when_something_was_measured(exporter: MetricsExporter) -> None:
    exporter.publish(snapshot(1, 1, {"audits": 0, "agreement": None, "mass": None, "worst_mass": None}))
    assert (value("recall_audits"), value("recall_mass")) == (0, None)
    exporter.publish(snapshot(1, 1, {"audits": 3, "agreement": 0.5, "mass": 0.75, "worst_mass": 0.25}))
    names = ("audits", "agreement", "mass", "worst_mass")
    assert [value(f"recall_{name}") for name in names] == [3, 0.5, 0.75, 0.25]
