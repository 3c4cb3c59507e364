"""The effect of the fetch cap on traffic and throughput, simulated with roofline times."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from sglang_oasis.planner.capacity import Deployment
from sglang_oasis.planner.roofline import Step, sparse_step
from sglang_oasis.planner.simulator import LayerWork, simulate
from sglang_oasis.tier.layout import fetch_cap

FETCH_RATIOS = (0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.5, 1.0)


class SweepPoint(NamedTuple):
    """Results of the simulated pipeline with one fetch cap.

    Attributes:
        ratio: the cap as a share of the selected blocks.
        cap: C, blocks per KV head and layer.
        fetch_bytes: bytes fetched per rank and step.
        step_seconds: simulated time of a step.
        stall_seconds: part of this time in which layers waited for their transfers.
        tokens_per_second: throughput of the whole batch.
        link_bytes_per_second: rate of the link, averaged over the step.
    """

    ratio: float
    cap: int
    fetch_bytes: float
    step_seconds: float
    stall_seconds: float
    tokens_per_second: float
    link_bytes_per_second: float


def fetch_cap_sweep(
    deployment: Deployment,
    batch: int,
    *,
    ratios: Sequence[float] = FETCH_RATIOS,
    drift: float | None = None,
    tokens_per_row: int | None = None,
    device_seconds: float | None = None,
) -> list[SweepPoint]:
    """Simulate decode steps with each fetch cap.

    Args:
        deployment: the model on its GPUs.
        batch: requests, all with the whole context.
        ratios: ratios of the cap to the selected blocks, ascending; equal caps are simulated once.
        drift: blocks per KV head and layer that newly become wanted in a step; None for all that are not resident.
            Blocks beyond the cap stay wanted, so a step fetches the smaller of the two numbers.
        tokens_per_row: as in `sparse_step`.
        device_seconds: time of a step that never waits, to which the roofline's parts are scaled; None for no scaling.
    """
    layout = deployment.layout
    points: dict[int, SweepPoint] = {}
    for ratio in ratios:
        cap = fetch_cap(ratio, min(layout.selected_blocks))
        if cap not in points:
            blocks = cap if drift is None else min(cap, drift)
            step = sparse_step(deployment, batch, blocks, tokens_per_row=tokens_per_row)
            stretch = 1.0 if device_seconds is None else device_seconds / step.device_seconds
            result = simulate(deployment.model.layers, *_work_of(deployment, step, stretch))
            points[cap] = SweepPoint(
                ratio, cap, step.fetch_bytes, result.step_seconds, result.stall_seconds,
                batch / result.step_seconds, step.fetch_bytes / result.step_seconds,
            )  # fmt: skip
    return list(points.values())


def _work_of(deployment: Deployment, step: Step, stretch: float) -> tuple[LayerWork, float]:
    """Return the work of each of a step's equal layers, and the seconds of the output embedding after them."""
    model = deployment.model
    head = step.weights * model.vocabulary * model.hidden / model.active_parameters
    share = stretch / model.layers
    layer = LayerWork(
        attention=step.attention * share,
        rest=(step.weights - head) * share,
        predict=step.predict * share,
        select=step.select * share,
        transfer=step.fetch_seconds / model.layers,
    )
    return layer, head * stretch
