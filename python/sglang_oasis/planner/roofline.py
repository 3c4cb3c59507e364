"""Lower bounds on the time of a decode step: bytes against bandwidths and operations against the peak.

Kernel launches, the CPU, communication between ranks, and kernels slower than the data sheet are not counted, so a real
step takes longer.
"""

from __future__ import annotations

from typing import NamedTuple

from sglang_oasis.planner.capacity import Deployment
from sglang_oasis.tier.layout import MAP_DTYPE, SCORE_DTYPE


class Work(NamedTuple):
    """The work of a part of a step on the device.

    Attributes:
        bytes: bytes moved to or from device memory.
        flops: operations of matrix products.
    """

    bytes: float
    flops: float = 0.0

    def seconds(self, deployment: Deployment) -> float:
        gpu = deployment.gpu
        return max(self.bytes / gpu.memory_bytes_per_second, self.flops / gpu.flops_per_second)

    def compute_bound(self, deployment: Deployment) -> bool:
        return self.seconds(deployment) > self.bytes / deployment.gpu.memory_bytes_per_second


class Step(NamedTuple):
    """The work and the time of a decode step on one rank.

    Attributes:
        weights: all matrix products except those of attention.
        attention: attention over the KV cache, or over its resident part.
        predict: scan of the summaries.
        select: top K of the scores, compared with the head maps.
        fetch_bytes: most bytes fetched from the host.
        fetch_seconds: time of the fetches on the link.
        seconds: time of the step if everything overlaps that may.
        bound: the part that takes longest.
    """

    weights: float
    attention: float
    predict: float
    select: float
    fetch_bytes: float
    fetch_seconds: float
    seconds: float
    bound: str

    @property
    def device_seconds(self) -> float:
        """Time on the device, without waiting for the link."""
        return self.weights + self.attention + self.predict + self.select


def dense_step(deployment: Deployment, batch: int) -> Step:
    """Return a step with the whole KV cache on the device."""
    return _step(deployment, batch, 1, deployment.context, Work(0), Work(0), 0.0)


def sparse_step(deployment: Deployment, batch: int, blocks: float, *, tokens_per_row: int | None = None) -> Step:
    """Return a step with lookahead KV.

    Args:
        deployment: the model on its GPUs.
        batch: requests, all with the whole context.
        blocks: blocks fetched per KV head and sparse layer, limited to those that are not resident.
        tokens_per_row: tokens per request and step, None for one token and the configured drafts.
    """
    layout, config = deployment.layout, deployment.config
    tokens = 1 + config.draft_tokens if tokens_per_row is None else tokens_per_row
    selected = sum(layout.selected_blocks) / layout.num_layers
    attended = min(deployment.context, (selected + layout.local_slots) * layout.block_size)
    heads = batch * layout.kv_heads * len(layout.sparse_layers)
    scores = heads * layout.max_blocks * SCORE_DTYPE.itemsize
    scan = heads * layout.max_blocks * layout.summary_bytes + scores * (3 if layout.smoothed else 1)
    maps = heads * (2 * min(layout.selected_blocks) + layout.max_blocks) * MAP_DTYPE.itemsize
    fetched = batch * layout.step_bytes(1) * min(blocks, deployment.fetchable_blocks)
    return _step(deployment, batch, tokens, attended, Work(scan), Work(scores + maps), fetched)


def step_bytes_budget(link_bytes_per_second: float, step_seconds: float) -> float:
    """Return C_token of OasisKV Eq. 3, in bytes: what the link moves while a step computes."""
    return link_bytes_per_second * step_seconds


class PipelineBound(NamedTuple):
    """OasisKV Eq. 4: the slowest stage of one layer must not take longer than a layer's share of a step.

    Attributes:
        predict, select, transfer: seconds of one layer's stages.
        interval: a layer's share of the step without waiting.
    """

    predict: float
    select: float
    transfer: float
    interval: float

    @property
    def holds(self) -> bool:
        return max(self.predict, self.select, self.transfer) <= self.interval


def pipeline_bound(step: Step, sparse_layers: int, layers: int) -> PipelineBound:
    """Return the times of the pipeline's stages in a step in which `sparse_layers` of `layers` layers fetch."""
    shared = max(1, sparse_layers)
    return PipelineBound(
        step.predict / shared, step.select / shared, step.fetch_seconds / shared, step.device_seconds / layers
    )


def _step(
    deployment: Deployment, batch: int, tokens: int, attended: float, scan: Work, select: Work, fetched: float
) -> Step:
    model, tp = deployment.model, deployment.tp
    passed = batch * tokens
    weights = Work(model.parameters_read(passed) * model.weight_bytes / tp, 2.0 * model.active_parameters * passed / tp)
    attention = Work(
        batch * attended * deployment.kv_token_bytes,
        4.0 * model.layers * model.query_heads / tp * model.head_dim * passed * attended,
    )
    parts = {
        "weights": weights.seconds(deployment),
        "attention": attention.seconds(deployment),
        "predict": scan.seconds(deployment),
        "select": select.seconds(deployment),
    }
    link = fetched / deployment.gpu.gather_bytes_per_second
    device = sum(parts.values())
    slowest = max(parts, key=lambda name: parts[name])
    names = {"weights": "weights", "attention": "KV cache", "predict": "summaries", "select": "head maps"}
    compute = {"weights": weights, "attention": attention}.get(slowest, scan).compute_bound(deployment)
    bound = "compute" if compute else f"device memory bandwidth ({names[slowest]})"
    return Step(**parts, fetch_bytes=fetched, fetch_seconds=link, seconds=max(device, link),
                bound="host link" if link > device else bound)  # fmt: skip
