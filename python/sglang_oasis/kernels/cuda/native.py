"""Builds the CUDA C++ kernels for the GPU of this machine when they are first needed, and gives them typed signatures.

Nothing here synchronises or allocates device memory, and the launch grids depend on shapes only: both kernels can be
captured in a CUDA graph. They run on the current stream of the device of their tensors, once `load` has loaded them.
"""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sglang_oasis.kernels import compiled
from sglang_oasis.ops.device_step import Admitting, Among, DeviceAdmissions, LayerState, Mark, Ranking
from sglang_oasis.ops.eviction import Maps
from sglang_oasis.ops.summary import SummaryFormat

logger = logging.getLogger(__name__)

NAME = "oasis_cuda"
CFLAGS = ("-O3", "-Wall", "-Wextra", "-Wno-unused-parameter")
CUDA_CFLAGS = ("-O3", "-lineinfo")
TOOLKIT = Path("/usr/local/cuda")
"""The folder of CUDA unless the environment names another."""
FETCH_THREAD_BLOCKS = 16
"""Thread blocks that copy from the host: with 32 KiB in flight each, few are enough for a PCIe 5 link."""

_module: Any = None
_attempted = False


def kernels() -> Any:
    """Return the loaded kernels, a module of tvm_ffi functions; None where they are absent."""
    return _module


def load() -> Any:
    """Load the kernels, after building them if they are not in the cache; None, and a warning, if that fails."""
    global _module, _attempted
    if not _attempted:
        _attempted = True
        try:
            import tvm_ffi

            _module = tvm_ffi.load_module(str(build()))
        except Exception as error:  # whatever the error is, the Triton kernels can serve
            logger.warning("The CUDA C++ kernels cannot be used, so Triton is used: %s.", compiled.reason(error))
    return _module


def build() -> Path:
    """Compile the kernels for the current GPU, or for `TVM_FFI_CUDA_ARCH_LIST`, unless they are in the cache.

    Returns:
        The shared library.

    Raises:
        RuntimeError: there is no CUDA toolkit or no GPU, or they do not compile.
    """
    home = cuda_home()
    architectures = os.environ.get("TVM_FFI_CUDA_ARCH_LIST")
    if architectures is None:
        architectures = ".".join(str(part) for part in torch.cuda.get_device_capability())
    return compiled.build(
        compiled.Recipe(
            NAME,
            title="CUDA kernels",
            folders=(compiled.source_folder("csrc/cuda"),),
            cflags=CFLAGS,
            cuda_cflags=CUDA_CFLAGS,
            ldflags=(f"-Wl,-rpath,{home / 'lib64'}",),
            compiler=str(home / "bin" / "nvcc"),
            environment=(("CUDA_HOME", str(home)), ("TVM_FFI_CUDA_ARCH_LIST", architectures)),
        )
    )


def cuda_home() -> Path:
    """Return the folder of the CUDA toolkit.

    Raises:
        RuntimeError: no toolkit is installed.
    """
    nvcc = shutil.which("nvcc")
    named = (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), nvcc and Path(nvcc).parents[1])
    for folder in (*(Path(name) for name in named if name), TOOLKIT):
        if (folder / "bin" / "nvcc").exists() and (folder / "include" / "cuda_runtime.h").exists():
            return folder
    raise RuntimeError("there is no CUDA toolkit; install one with nvcc, or set CUDA_HOME to its folder")


def fetch_blocks(
    layer: LayerState,
    rows: Tensor,
    admissions: DeviceAdmissions,
    mark: Mark,
    thread_blocks: int = FETCH_THREAD_BLOCKS,
) -> None:
    """Load admitted blocks from their host pages into resident slots and update the maps.

    Implements `ops.device_step.fetch_blocks`: a warp reads one (page, head) chunk after another from host memory.

    Args:
        layer: both tiers; K and V contiguous and of one dtype, those of the host pinned; pages start at multiples of B.
        rows: [n] int64.
        admissions: what to load.
        mark: mark of the loaded blocks.
        thread_blocks: number of thread blocks that copy; fewer leave more of the GPU to other kernels.

    Raises:
        ValueError: a shape, dtype or device is wrong.
        RuntimeError: the launch failed.
    """
    _module.fetch_blocks(
        layer.blocks, *layer.maps, layer.host_kv, layer.req_to_token, rows, *admissions, *mark, thread_blocks
    )


def fits(queries: Tensor, maps: Maps, fmt: SummaryFormat) -> bool:
    """Whether the shared memory is large enough for `fused_select` with queries [n, Q, H*G, D] of this shape."""
    return _module.fused_select_fits(queries, fmt.bits, *maps.head_map.shape[1:])


def fused_select(
    queries: Tensor,
    layer: LayerState,
    among: Among,
    ranking: Ranking,
    mark: Mark,
    admitting: Admitting,
    scratch: Tensor,
    shared_bytes: int = 0,
) -> None:
    """Score blocks, find the K best, mark the resident ones among them, and choose what to load into which slots.

    Implements `ops.prediction.predict_admissions` in one kernel, one thread block per (entry, head). Summaries are read
    once if the logits fit into shared memory, else twice. Entries with 0 candidates admit and change nothing.

    Args:
        queries: [n, Q, H*G, D], contiguous; D is a multiple of 16, 256 at most.
        layer: its `maps.last_selected` and averages are written; without averages, this step's scores rank the blocks.
        among: what may be chosen.
        ranking: how.
        mark: mark of the K best blocks that are resident.
        admitting: what is written.
        scratch: [n or more, H, N] float32, with any contents.
        shared_bytes: most bytes of shared memory to use; 0 for all that the device has.

    Raises:
        ValueError: a shape, dtype or device is wrong.
        RuntimeError: the launch failed, or even the queries of a head do not fit into shared memory.
    """
    fmt, scale, tightness, decay, sinks, escape = ranking
    cap, admissions, counters = admitting
    _module.fused_select(
        queries, layer.summaries, fmt.bits, fmt.scaling, *among, *layer.maps, layer.averages, scale, tightness, decay,
        escape, sinks, *mark, cap, *admissions, counters, scratch, shared_bytes,
    )  # fmt: skip
