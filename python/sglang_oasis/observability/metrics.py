"""Prometheus metrics: every number of `/lookahead_kv/stats` as `sglang:lookahead_kv_*`.

Read from sglang 0.5.23, `observability/metrics_collector.py`: prometheus_client may be imported only after SGLang has
set PROMETHEUS_MULTIPROC_DIR, and gauges of several processes are merged by their multiprocess mode.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

PREFIX = "sglang:lookahead_kv_"
INTERVAL = 1.0
"""Seconds between two publications while requests are running."""


class MetricsExporter:
    """Publishes statistics to Prometheus; must be created in the scheduler process.

    Args:
        labels: label name -> value, the same for every metric.
    """

    def __init__(self, labels: dict[str, str]) -> None:
        self._labels = labels
        self._metrics: dict[str, Any] = {}
        self._published: dict[str, float] = {}
        self._last = float("-inf")

    def due(self) -> bool:
        """Whether the last publication is at least INTERVAL seconds old."""
        return time.monotonic() - self._last >= INTERVAL

    def publish(self, statistics: dict[str, Any]) -> None:
        """Update the metrics with the statistics of this rank."""
        self._last = time.monotonic()
        for name, value in _counters(statistics):
            self._metric("Counter", name).inc(value - self._published.get(name, 0))
            self._published[name] = value
        for name, value in _gauges(statistics):
            self._metric("Gauge", name, multiprocess_mode="mostrecent").set(value)

    def _metric(self, kind: str, name: str, **options: Any) -> Any:
        if name not in self._metrics:
            import prometheus_client

            text = f"Lookahead KV: {name.replace('_', ' ')}."
            metric = getattr(prometheus_client, kind)(PREFIX + name, text, labelnames=list(self._labels), **options)
            self._metrics[name] = metric.labels(**self._labels)
        return self._metrics[name]


def _counters(statistics: dict[str, Any]) -> Iterator[tuple[str, float]]:
    yield from statistics["counters"].items()
    for stage, seconds in statistics["seconds"].items():
        yield f"{stage}_seconds", seconds
    for part, seconds in statistics["step_seconds"].items():
        yield f"step_{part}_seconds", seconds


def _gauges(statistics: dict[str, Any]) -> Iterator[tuple[str, float]]:
    for group in ("rows", "host_tokens"):
        for name, value in statistics[group].items():
            yield f"{group}_{name}", value
    for name, value in statistics["bytes"].items():
        yield f"{name}_bytes", value
    yield "fetch_cap", statistics["fetch_cap"]
    recall = statistics["recall"] or {}
    for name in ("audits", "agreement", "mass", "worst_mass"):
        if recall.get(name) is not None:
            yield f"recall_{name}", recall[name]
