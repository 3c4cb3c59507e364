"""Registers the CUDA implementations of the ops: Triton kernels, and C++ kernels where they are faster.

Building the C++ kernels needs a CUDA toolkit; without them, or for shapes that they do not support, Triton serves.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor

from sglang_oasis.kernels.cuda import native
from sglang_oasis.kernels.triton import overrides, staging
from sglang_oasis.ops import device_step
from sglang_oasis.ops.device_step import Admitting, Among, DeviceAdmissions, LayerState, Mark, Ranking
from sglang_oasis.ops.prediction import predict_admissions

logger = logging.getLogger(__name__)

TRITON = (overrides, staging)
"""Modules that register their ops when they are imported."""

_fits: dict[tuple[Any, ...], bool] = {}
"""Shapes seen so far, and whether the C++ kernel supports them."""


def install() -> None:
    """Use the C++ kernels from now on, if they can be built."""
    if native.load() is not None:
        predict_admissions.register("cuda")(_predict_admissions)
        device_step.fetch_blocks.register("cuda")(_fetch_blocks)


def _predict_admissions(
    queries: Tensor, layer: LayerState, among: Among, ranking: Ranking, mark: Mark, admitting: Admitting
) -> None:
    shape = (queries.shape[1:], queries.dtype, ranking.fmt, layer.maps.head_map.shape[1:])
    if shape not in _fits:
        _fits[shape] = native.fits(queries, layer.maps, ranking.fmt)
        if not _fits[shape]:
            logger.warning(
                "Using Triton to select blocks: this GPU's shared memory is too small for queries of %s and %d slots.",
                " x ".join(map(str, shape[0])),
                layer.maps.head_map.shape[-1],
            )
    if not _fits[shape]:
        return NotImplemented
    scratch = torch.empty((len(among.rows), *layer.summaries.shape[1:3]), device=queries.device)
    native.fused_select(queries.contiguous(), layer, among, ranking, mark, admitting, scratch)
    return None


def _fetch_blocks(layer: LayerState, rows: Tensor, admissions: DeviceAdmissions, mark: Mark) -> None:
    if layer.blocks.dtype != layer.host_kv.dtype:
        return overrides.fetch_blocks(layer, rows, admissions, mark)
    native.fetch_blocks(layer, rows, admissions, mark)
    return None
