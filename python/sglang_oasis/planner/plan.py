"""A plan: how many requests fit, how fast a step can be, what limits it, and the server's flags."""

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
    gigabytes,
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


@dataclass(frozen=True)
class Plan:
    """The results of the planner; bytes and times are those of one rank.

    Attributes:
        deployment: the planned system.
        capacity: the largest batches.
        dense_batch, batch: requests in the steps `dense` and `sparse`.
        request: bytes of one request in every tier.
        dense, sparse: a decode step, dense and with lookahead KV; dense is None if no request fits densely.
        step_bytes: OasisKV Eq. 3, bytes that the link can move during a sparse step.
        pipeline: OasisKV Eq. 4.
        cap: C, blocks that a step may fetch per KV head and layer.
        fetched_blocks: blocks of these that the step fetches.
        sweep: the simulated pipeline with other caps.
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
    fetched_blocks: float
    sweep: list[SweepPoint]

    @property
    def tokens_of_step_bytes(self) -> float:
        """`step_bytes` as tokens of KV per request, the unit of OasisKV Eq. 3."""
        return self.step_bytes / self.batch / self.deployment.kv_token_bytes

    @property
    def device_tier_bytes(self) -> int:
        """Bytes of the resident tier with summaries, including SGLang's padding row."""
        return (self.batch + 1) * self.deployment.layout.row_bytes

    @property
    def device_flag_bytes(self) -> int:
        """Bytes that --lookahead-kv-device-gb must give: the device tier and the prefill staging."""
        return self.device_tier_bytes + self.deployment.staging_bytes

    @property
    def host_tier_bytes(self) -> int:
        """Bytes of the host pool of one rank."""
        return host_bytes_for(self.deployment, self.batch)

    @property
    def speedup(self) -> float | None:
        """Throughput relative to dense serving, None if no request fits densely."""
        if self.dense is None:
            return None
        return self.batch / self.sparse.seconds / (self.dense_batch / self.dense.seconds)

    @property
    def fetch_ratio(self) -> float:
        """The fetch ratio with which the server has the cap `cap`."""
        blocks, most = min(self.deployment.layout.selected_blocks), _most_fetch_ratio(self.deployment)
        # Halfway to the next cap, because the server rounds down.
        return most if self.cap == fetch_cap(most, blocks) else round((self.cap + 0.5) / blocks, 6)

    @property
    def remarks(self) -> list[str]:
        """Return remarks that a user of the command must know, one sentence each."""
        deployment, model = self.deployment, self.deployment.model
        found = []
        if self.speedup is not None and round(self.speedup, 1) <= 1:
            found.append(
                f"Lookahead KV does not help here: at most {self.speedup:.2f} times the throughput of dense serving."
            )
        if model.max_context is not None and deployment.context > model.max_context:
            found.append(
                f"{model.name} was made for {model.max_context} tokens: the server refuses a longer --context-length "
                f"unless its config.json scales RoPE or SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN=1 is set."
            )
        if model.weight_bytes != model.dtype.itemsize and not model.quantised:
            bits = 8 * model.weight_bytes
            found.append(
                f"--model-path must name a checkpoint with {bits:g} bits per weight; that of {model.name} has others."
            )
        if model.checkpoint != model.name:
            found.append(f"Replace {model.checkpoint} by the model folder to which {model.name} belongs.")
        return found

    @property
    def command(self) -> str:
        """Return the shell command that starts a server with this plan."""
        deployment = self.deployment
        flags: dict[str, Any] = {
            "--model-path": deployment.model.checkpoint,
            "--tp-size": deployment.tp,
            "--context-length": deployment.context,
            "--page-size": deployment.config.block_size,
            "--mem-fraction-static": deployment.memory_fraction,
            "--max-running-requests": self.batch,
            "--lookahead-kv-host-gb": gigabytes(self.host_tier_bytes),
            "--lookahead-kv-device-gb": gigabytes(self.device_flag_bytes),
            "--lookahead-kv-fetch-ratio": self.fetch_ratio,
            **_other_than_default(deployment),
        }
        words = ["python", "-m", "sglang.launch_server", "--enable-lookahead-kv"]
        return shlex.join([*words, *(str(word) for pair in flags.items() for word in pair)])


def make_plan(deployment: Deployment, batch: int | None = None, drift: float | None = None) -> Plan:
    """Plan a deployment.

    Args:
        deployment: the system to plan.
        batch: requests that decode concurrently, None for as many as fit.
        drift: blocks per KV head and layer that newly become wanted in a step, None for as many as the cap allows.

    Raises:
        LookaheadKVError: the deployment or the batch does not fit.
    """
    capacity = capacity_of(deployment)
    wanted = capacity.lookahead if batch is None else batch
    if wanted > capacity.lookahead:
        raise LookaheadKVError(
            f"--batch {wanted} does not fit, because {capacity.bound} holds {capacity.lookahead} requests of "
            f"{deployment.context} tokens: lower --batch, --context or --budget."
        )
    layout = deployment.layout
    dense_batch = capacity.dense if batch is None else min(capacity.dense, batch)
    idle_link = sparse_step(deployment, wanted, 0)
    step_bytes = step_bytes_budget(deployment.gpu.gather_bytes_per_second, idle_link.device_seconds)
    missing = deployment.fetchable_blocks if drift is None else min(drift, deployment.fetchable_blocks)
    cap = _cap(deployment, wanted, step_bytes, missing)
    sparse = sparse_step(deployment, wanted, min(cap, missing))
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
        fetched_blocks=min(cap, missing),
        sweep=fetch_cap_sweep(deployment, wanted, drift=drift),
    )


def _most_fetch_ratio(deployment: Deployment) -> float:
    """Return the configured fetch ratio, or else the default."""
    ratio = deployment.config.fetch_ratio
    return DEFAULT_FETCH_RATIO if ratio is None else ratio


def _cap(deployment: Deployment, batch: int, step_bytes: float, missing: float) -> int:
    """Return C: as configured, or else the default, or less if the link could not move so many blocks in a step."""
    layout = deployment.layout
    cap = fetch_cap(_most_fetch_ratio(deployment), min(layout.selected_blocks))
    block_bytes = batch * layout.step_bytes(1)
    hidden = int(step_bytes / block_bytes) if block_bytes else cap
    if deployment.config.fetch_ratio is not None or missing <= hidden:
        return cap
    return max(1, min(cap, hidden))


def _other_than_default(deployment: Deployment) -> dict[str, Any]:
    """Return the flags of lookahead KV that differ from the server's defaults."""
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
