"""A plan: the answers to how many requests, how fast, what limits it, and with which flags."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from typing import Any

from sglang_oasis.config import DEFAULT_FETCH_RATIO, KNOBS
from sglang_oasis.errors import LookaheadKVError
from sglang_oasis.planner.capacity import (
    Capacity,
    Deployment,
    RequestBytes,
    capacity_of,
    host_bytes_for,
    request_bytes,
)
from sglang_oasis.planner.roofline import (
    PipelineBound,
    Step,
    dense_step,
    pipeline_bound,
    sparse_step,
    step_bytes_budget,
)
from sglang_oasis.planner.sweep import SweepPoint, fetch_cap_sweep
from sglang_oasis.tier.layout import fetch_cap

MEGABYTE = 10**6


@dataclass(frozen=True)
class Plan:
    """What the planner found; bytes and times are those of one rank.

    Attributes:
        deployment: what was planned.
        capacity: the largest batches.
        dense_batch, batch: requests in the steps below, dense and with lookahead KV.
        request: what one request takes in every tier.
        dense, sparse: a decode step; dense is None where no request fits densely.
        step_bytes: OasisKV Eq. 3, what the link moves behind a sparse step.
        pipeline: OasisKV Eq. 4.
        cap: C, blocks that the step may fetch per KV head and layer.
        sweep: the simulated pipeline under other caps.
    """

    deployment: Deployment
    capacity: Capacity
    dense_batch: int
    batch: int
    request: RequestBytes
    dense: Step | None
    sparse: Step
    step_bytes: float
    pipeline: PipelineBound
    cap: int
    sweep: list[SweepPoint]

    @property
    def tokens_of_step_bytes(self) -> float:
        """The same as tokens of KV per request, as OasisKV counts them by Eq. 3."""
        return self.step_bytes / self.batch / self.deployment.kv_token_bytes

    @property
    def device_tier_bytes(self) -> int:
        """Of the resident tier with summaries, and SGLang's padding row."""
        return (self.batch + 1) * self.deployment.layout.row_bytes

    @property
    def host_tier_bytes(self) -> int:
        """Of the host pool."""
        return host_bytes_for(self.deployment, self.batch)

    @property
    def speedup(self) -> float | None:
        """Throughput against dense serving, None where that serves nothing."""
        if self.dense is None:
            return None
        return self.batch / self.sparse.seconds / (self.dense_batch / self.dense.seconds)

    @property
    def command(self) -> str:
        """A server with this plan, for a shell."""
        deployment = self.deployment
        blocks = min(deployment.layout.selected_blocks)
        flags: dict[str, Any] = {
            "--model-path": deployment.model.name,
            "--tp-size": deployment.tp,
            "--context-length": deployment.context,
            "--page-size": deployment.config.block_size,
            "--mem-fraction-static": deployment.memory_fraction,
            "--max-running-requests": self.batch,
            "--lookahead-kv-host-gb": _gigabytes(self.host_tier_bytes),
            "--lookahead-kv-device-gb": _gigabytes(self.device_tier_bytes + deployment.staging_bytes),
            # Between two caps: the server rounds down.
            "--lookahead-kv-fetch-ratio": f"{min(1.0, (self.cap + 0.5) / blocks):.4g}",
            **_other_than_default(deployment),
        }
        words = ["python", "-m", "sglang.launch_server", "--enable-lookahead-kv"]
        return shlex.join([*words, *(str(word) for pair in flags.items() for word in pair)])


def make_plan(deployment: Deployment, batch: int | None = None, drift: float | None = None) -> Plan:
    """Plan a deployment.

    Args:
        deployment: what to plan.
        batch: requests that decode at once, None for as many as fit.
        drift: blocks per KV head and layer that a step wants anew, None for as many as the cap lets through.

    Raises:
        LookaheadKVError: it does not fit.
    """
    capacity = capacity_of(deployment)
    wanted = capacity.lookahead if batch is None else batch
    if wanted > capacity.lookahead:
        raise LookaheadKVError(
            f"--batch {wanted} does not fit: {capacity.bound} holds {capacity.lookahead} requests of "
            f"{deployment.context} tokens, lower it, --context or --budget."
        )
    layout = deployment.layout
    dense_batch = capacity.dense if batch is None else min(capacity.dense, batch)
    idle_link = sparse_step(deployment, wanted, 0)
    step_bytes = step_bytes_budget(deployment.gpu.gather_bytes_per_second, idle_link.device_seconds)
    cap = _cap(deployment, wanted, step_bytes, drift)
    sparse = sparse_step(deployment, wanted, cap if drift is None else min(cap, drift))
    return Plan(
        deployment=deployment,
        capacity=capacity,
        dense_batch=dense_batch,
        batch=wanted,
        request=request_bytes(layout, deployment.context),
        dense=dense_step(deployment, dense_batch) if dense_batch else None,
        sparse=sparse,
        step_bytes=step_bytes,
        pipeline=pipeline_bound(sparse, len(layout.sparse_layers), layout.num_layers),
        cap=cap,
        sweep=fetch_cap_sweep(deployment, wanted, drift=drift),
    )


def _cap(deployment: Deployment, batch: int, step_bytes: float, drift: float | None) -> int:
    """C: as configured, or else the default, or less where the link could not hide that."""
    layout, ratio = deployment.layout, deployment.config.fetch_ratio
    cap = fetch_cap(DEFAULT_FETCH_RATIO if ratio is None else ratio, min(layout.selected_blocks))
    block_bytes = batch * layout.step_bytes(1)
    hidden = int(step_bytes / block_bytes) if block_bytes else cap
    if ratio is not None or (drift is not None and drift <= hidden):
        return cap
    return max(1, min(cap, hidden))


def _gigabytes(size: int) -> str:
    """For a flag: rounded up, so that `size` fits."""
    return f"{(size // MEGABYTE + 1) / 1000:.3f}"


def _other_than_default(deployment: Deployment) -> dict[str, Any]:
    """Flags of lookahead KV that differ from what the server would take."""
    config = deployment.config
    given = {
        "lookahead_kv_budget_tokens": config.budget_tokens,
        "lookahead_kv_recent_tokens": config.recent_tokens,
        "lookahead_kv_sink_tokens": config.sink_tokens,
        "lookahead_kv_smoothing": config.smoothing,
        "lookahead_kv_summary_dtype": config.summary_dtype,
        "lookahead_kv_dense_layers": ",".join(map(str, config.dense_layers)),
    }
    return {knob.flag: given[knob.name] for knob in KNOBS if knob.name in given and given[knob.name] != knob.default}
