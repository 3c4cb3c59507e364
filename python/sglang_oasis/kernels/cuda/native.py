"""The CUDA C++ kernels: built for the GPU at hand when first needed, and their typed faces.

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
"""Where CUDA is installed unless the environment says otherwise."""
FETCH_THREAD_BLOCKS = 16
"""Thread blocks that copy from the host: 32 KiB in flight each, enough for a PCIe 5 link, on few of the processors."""

_module: Any = None
_attempted = False


def kernels() -> Any:
    """The loaded kernels, a module of tvm_ffi functions; None where they are absent."""
    return _module


def load() -> Any:
    """Build the kernels if they are not in the cache, and load them; None, and a warning, where that is impossible."""
    global _module, _attempted
    if not _attempted:
        _attempted = True
        try:
            import tvm_ffi

            _module = tvm_ffi.load_module(str(build()))
        except Exception as error:  # whatever is wrong with them, there are the Triton kernels
            logger.warning("The CUDA C++ kernels cannot be used, Triton does it: %s.", compiled.reason(error))
    return _module


def build() -> Path:
    """Compile the kernels for the current GPU, or for `TVM_FFI_CUDA_ARCH_LIST`, unless the cache has them.

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
    """Folder of the CUDA toolkit.

    Raises:
        RuntimeError: there is none.
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
    """Load admitted blocks from their host pages over resident slots and update the maps.

    `ops.device_step.fetch_blocks`: a warp reads one (page, head) chunk after the other from host memory.

    Args:
        layer: its K and V contiguous and of one dtype, those of the host in pinned memory; pages are multiples of B.
        rows: [n] int64.
        admissions: what to load.
        mark: of the loaded blocks.
        thread_blocks: of the GPU that copy; fewer leave more of it to others.

    Raises:
        ValueError: a shape, dtype or device is wrong.
        RuntimeError: the launch failed.
    """
    _module.fetch_blocks(
        layer.blocks, *layer.maps, layer.host_kv, layer.req_to_token, rows, *admissions, *mark, thread_blocks
    )


def fits(queries: Tensor, maps: Maps, fmt: SummaryFormat) -> bool:
    """Whether the shared memory suffices for `fused_select` with queries of this shape, [n, Q, H*G, D]."""
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
    """Score blocks, find the K best, mark the resident ones and choose what to load over which slots.

    `ops.prediction.predict_admissions` in one kernel, one thread block per (entry, head). Summaries are read once where
    the logits fit into shared memory, and twice beyond. Entries with 0 candidates admit nothing and touch nothing else.

    Args:
        queries: [n, Q, H*G, D], contiguous; D is a multiple of 16, 256 at most.
        layer: `maps.last_selected` and the averages are written; without averages, the scores of this step rank.
        among: what may be chosen.
        ranking: how.
        mark: of the blocks among the best that are resident.
        admitting: what is written.
        scratch: [n or more, H, N] float32, anything.
        shared_bytes: of shared memory at most, 0: all that the device has.

    Raises:
        ValueError: a shape, dtype or device is wrong.
        RuntimeError: the launch failed, or even the queries of a head do not fit into shared memory.
    """
    fmt, scale, tightness, decay, sinks, escape = ranking
    cap, admissions, counters = admitting
    _module.fused_select(
        queries, layer.summaries, fmt.bits, *among, *layer.maps, layer.averages, scale, tightness, decay, escape, sinks,
        *mark, cap, *admissions, counters, scratch, shared_bytes,
    )  # fmt: skip
