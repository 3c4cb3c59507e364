"""Prometheus shows the numbers of the statistics, counters never twice."""

from __future__ import annotations

import prometheus_client

from sglang_oasis.observability.metrics import PREFIX, MetricsExporter


def snapshot(fetched: int, active: int) -> dict[str, dict[str, float]]:
    return {
        "rows": {"capacity": 4, "active": active},
        "host_tokens": {"capacity": 100, "used": 7},
        "bytes": {"resident": 640},
        "counters": {"blocks_fetched": fetched},
        "seconds": {"stall": 0.5},
        "step_seconds": {"model": 0.25},
    }


def value(name: str) -> float | None:
    return prometheus_client.REGISTRY.get_sample_value(PREFIX + name, {"model_name": "m"})


def test_counters_follow_the_statistics_and_gauges_replace_each_other() -> None:
    exporter = MetricsExporter({"model_name": "m"})
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
