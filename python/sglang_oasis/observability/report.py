"""The start-up summary and the statistics, both read off the attention backend."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from sglang_oasis.serving.lookahead_backend import TierBackend


def start_up_summary(backend: TierBackend) -> str:
    """One block that a human can check, logged when the tiers are built."""
    config, layout, tier = backend.config, backend.tier.layout, backend.tier
    tokens = (backend.host.num_pages - 1) * layout.block_size
    ratio = "adaptive" if config.fetch_ratio is None else f"ratio {config.fetch_ratio}"
    budget = min(layout.selected_blocks)
    cap = budget if config.fetch_ratio is None else backend.controller.cap.blocks(budget)
    covers = " (the whole context, so attention is exact)" if budget == layout.max_blocks else ""
    lines = [
        "Lookahead KV is on",
        f"  host KV          {tokens} tokens, {_gb(backend.host.nbytes)} with summaries",
        f"  dtype            computes in {_name(backend.compute_dtype)}, keeps K and V in {_name(layout.dtype)}",
        f"  rows             {tier.num_rows - 1} requests decode at once",
        f"  device           {_gb(tier.num_rows * layout.row_bytes)}: {_mb(layout.row_bytes)} per row, "
        f"of which summaries {_mb(layout.row_summary_bytes)}",
        f"  budget           {budget} blocks of {config.block_size} tokens per KV head and layer{covers}, of which "
        f"{layout.sink_blocks} sink blocks; besides {layout.recent_blocks} recent blocks and the open one; "
        f"dense layers: {', '.join(map(str, config.dense_layers)) or 'none'}",
        f"  step             at most {_mb(layout.step_bytes(cap))} fetched ahead per row ({ratio}), "
        f"source {config.source}, miss policy {config.miss_policy}, selector {config.selector}, "
        f"smoothing {config.smoothing}",
    ]
    if (staging := backend.staging) is not None:
        cached = len(staging.cache.tags) * layout.block_size
        lines.append(f"  prefill          {_gb(staging.nbytes)}: two staging buffers and a cache of {cached} tokens")
    return "\n".join(lines)


def statistics(backend: TierBackend) -> dict[str, Any]:
    """What `/lookahead_kv/stats` reports for one rank; see docs/observability.md for every field."""
    tier, layout, pipeline = backend.tier, backend.tier.layout, backend.controller.pipeline.statistics()
    counters = backend.counters()
    capacity, free = backend.host_tokens()
    cap = backend.controller.cap.blocks(min(layout.selected_blocks))
    return {
        "config": dataclasses.asdict(backend.config),
        "rows": {"capacity": tier.num_rows - 1, "active": len(tier.rows)},
        "host_tokens": {"capacity": capacity, "used": capacity - free},
        "bytes": {
            "host_capacity": backend.host.nbytes,
            "device_capacity": sum(each.num_rows * each.layout.row_bytes for each in backend.tiers),
            "resident": sum(each.used_bytes for each in backend.tiers),
            "summaries": sum(each.used_summary_bytes for each in backend.tiers),
            "staging": 0 if backend.staging is None else backend.staging.nbytes,
            "step_budget": layout.step_bytes(cap),
        },
        "fetch_cap": cap,
        "counters": {
            **dataclasses.asdict(counters),
            "blocks_fetched": pipeline.fetched,
            "bytes_fetched": pipeline.fetched * layout.chunk_bytes,
            "evictions": pipeline.fetched,
            "misses": pipeline.deferred + counters.blocks_urgent,
            "stalls": pipeline.stalls,
        },
        "seconds": {**pipeline.seconds, "stall": pipeline.stall_seconds},
        "step_seconds": dict(backend.clock.seconds),
        "recall": None if backend.audit is None else backend.audit.statistics(),
    }


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _gb(size: int) -> str:
    return f"{size / 1e9:.2f} GB"


def _mb(size: int) -> str:
    return f"{size / 1e6:.2f} MB"
