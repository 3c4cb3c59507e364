"""Puts the CUDA implementations of the ops in the place of the references: Triton's, and C++ where it is faster.

The C++ kernels need a CUDA toolkit to be built; without them, or for shapes that they decline, Triton serves.
"""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from sglang_oasis.kernels.cuda import native
from sglang_oasis.kernels.triton import overrides, staging
from sglang_oasis.ops import device_step
from sglang_oasis.ops.device_step import DeviceAdmissions
from sglang_oasis.ops.eviction import Maps
from sglang_oasis.ops.prediction import Ranking, predict_admissions

logger = logging.getLogger(__name__)

TRITON = (overrides, staging)
"""Modules that register their ops when they are imported."""

_DOES_NOT_FIT = "do not fit into the shared memory"
"""What `fused_select.cu` says before it launches anything."""

_declined: set[tuple[object, ...]] = set()
"""Shapes whose queries and slots do not fit into shared memory."""


def install() -> None:
    """Use the C++ kernels from now on, if they can be built."""
    if native.load() is not None:
        predict_admissions.register("cuda")(_predict_admissions)
        device_step.fetch_blocks.register("cuda")(_fetch_blocks)


def _predict_admissions(
    queries: Tensor,
    summaries: Tensor,
    averages: Tensor | None,
    maps: Maps,
    rows: Tensor,
    candidates: Tensor,
    ranking: Ranking,
    number: Tensor,
    offset: int,
    cap: Tensor,
    admissions: DeviceAdmissions,
    counters: Tensor,
) -> None:
    shape = (queries.shape[1:], queries.dtype, maps.head_map.shape[1:])
    if shape in _declined:
        return NotImplemented
    scratch = torch.empty((len(rows), *summaries.shape[1:3]), device=queries.device)
    try:
        native.fused_select(
            queries.contiguous(), summaries, ranking.fmt, rows, candidates, maps, averages, ranking.scale,
            ranking.tightness, ranking.decay, ranking.sinks, number, offset, cap, admissions, counters, scratch,
        )  # fmt: skip
    except RuntimeError as error:
        if _DOES_NOT_FIT not in str(error):
            raise
        logger.warning("Triton selects blocks, because the CUDA kernel does not take this shape: %s.", error)
        _declined.add(shape)
        return NotImplemented
    return None


def _fetch_blocks(
    blocks: Tensor,
    maps: Maps,
    host_kv: Tensor,
    req_to_token: Tensor,
    rows: Tensor,
    admissions: DeviceAdmissions,
    number: Tensor,
    offset: int,
) -> None:
    if blocks.dtype != host_kv.dtype:
        return overrides.fetch_blocks(blocks, maps, host_kv, req_to_token, rows, admissions, number, offset)
    native.fetch_blocks(blocks, maps, host_kv, req_to_token, rows, admissions, number, offset)
    return None
