"""The start-up summary and the statistics of an engine, both made from its snapshot."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from sglang_oasis.engine.base import Snapshot


def start_up_summary(snapshot: Snapshot, compute_dtype: torch.dtype) -> str:
    """Return the text that is logged when the tiers are built, in which a user can check the settings.

    Args:
        snapshot: counts and sizes of the engine.
        compute_dtype: dtype of weights and activations; K and V may be stored in another dtype.
    """
    config, layout = snapshot.config, snapshot.layout
    ratio = "adaptive" if config.fetch_ratio is None else f"ratio {config.fetch_ratio}"
    budget = min(layout.selected_blocks)
    cap = budget if config.fetch_ratio is None else snapshot.fetch_cap
    covers = " (the whole context, so attention is exact)" if budget == layout.max_blocks else ""
    lines = [
        "Lookahead KV is on",
        f"  host KV          {snapshot.host_tokens} tokens, {_gb(snapshot.host_bytes)} with summaries",
        f"  dtype            computes in {_name(compute_dtype)}, keeps K and V in {_name(layout.dtype)}",
        f"  rows             {snapshot.rows_capacity} requests decode concurrently",
        f"  device           {_gb((snapshot.rows_capacity + 1) * layout.row_bytes)}: {_mb(layout.row_bytes)} per row, "
        f"of which summaries {_mb(layout.row_summary_bytes)}",
        f"  budget           {budget} blocks of {config.block_size} tokens per KV head and layer{covers}, of which "
        f"{layout.sink_blocks} sink blocks; besides {layout.recent_blocks} recent blocks and the open one; "
        f"dense layers: {', '.join(map(str, config.dense_layers)) or 'none'}",
        f"  step             at most {_mb(layout.step_bytes(cap))} fetched ahead per row ({ratio}), "
        f"source {config.source}, miss policy {config.miss_policy}, selector {config.selector}, "
        f"smoothing {config.smoothing}",
    ]
    relative = "relative to the model's calibration" if snapshot.calibrated else "not calibrated"
    lines.append(f"  summaries        {config.summary_dtype}, {relative}")
    if snapshot.staging_bytes:
        staged, cached = _gb(snapshot.staging_bytes), snapshot.cached_tokens
        lines.append(f"  prefill          {staged}: two staging buffers and a cache of {cached} tokens")
    return "\n".join(lines)


def statistics(snapshot: Snapshot, capacity: int, free: int) -> dict[str, Any]:
    """Return what `/lookahead_kv/stats` reports for one rank; docs/observability.md explains every field.

    Args:
        snapshot: counts and sizes of the engine.
        capacity, free: tokens of the host pool, in all and free; requests and the prefix cache hold the others.
    """
    layout, counters, pipeline = snapshot.layout, snapshot.counters, snapshot.pipeline
    return {
        "config": dataclasses.asdict(snapshot.config),
        "rows": {"capacity": snapshot.rows_capacity, "active": snapshot.rows_active},
        "host_tokens": {"capacity": capacity, "used": capacity - free},
        "bytes": {
            "host_capacity": snapshot.host_bytes,
            "device_capacity": snapshot.device_bytes,
            "resident": snapshot.resident_bytes,
            "summaries": snapshot.summary_bytes,
            "staging": snapshot.staging_bytes,
            "step_budget": layout.step_bytes(snapshot.fetch_cap),
        },
        "fetch_cap": snapshot.fetch_cap,
        "counters": {
            **dataclasses.asdict(counters),
            "blocks_fetched": pipeline.fetched,
            "bytes_fetched": pipeline.fetched * layout.chunk_bytes,
            "misses": pipeline.deferred + counters.blocks_urgent,
            "stalls": pipeline.stalls,
        },
        "seconds": {**pipeline.seconds, "stall": pipeline.stall_seconds},
        "step_seconds": snapshot.step_seconds,
        "calibrated": snapshot.calibrated,
        "recall": snapshot.recall,
    }


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _gb(size: int) -> str:
    return f"{size / 1e9:.2f} GB"


def _mb(size: int) -> str:
    return f"{size / 1e6:.2f} MB"
