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
from sglang_oasis.ops.eviction import Maps
from sglang_oasis.ops.smoothing import ESCAPE
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
    blocks: Tensor,
    maps: Maps,
    host_kv: Tensor,
    req_to_token: Tensor,
    rows: Tensor,
    admissions: tuple[Tensor, Tensor],
    number: Tensor,
    offset: int,
    thread_blocks: int = FETCH_THREAD_BLOCKS,
) -> None:
    """Load admitted blocks from their host pages over resident slots and update the maps.

    `ops.eviction.admit_blocks` on the device: a warp reads one (page, head) chunk after the other from host memory.

    Args:
        blocks: [S, H, P, 2, B, D], contiguous.
        maps: of the layer.
        host_kv: [N_pages, H, 2, B, D] of the same dtype, contiguous, in pinned host memory.
        req_to_token: [S, context] int32, KV index of each token; pages are multiples of B.
        rows: [n] int64.
        admissions: blocks and slots, [n, H, C] int32 each, -1 where there is none.
        number: [1] int32, of the step.
        offset: the blocks are marked as selected in 2 * number + offset.
        thread_blocks: of the GPU that copy; fewer leave more of it to others.

    Raises:
        ValueError: a shape, dtype or device is wrong.
        RuntimeError: the launch failed.
    """
    admitted, slots = admissions
    _module.fetch_blocks(blocks, *maps, host_kv, req_to_token, rows, admitted, slots, number, offset, thread_blocks)


def fused_select(
    queries: Tensor,
    summaries: Tensor,
    fmt: SummaryFormat,
    rows: Tensor,
    candidates: Tensor,
    maps: Maps,
    averages: Tensor | None,
    scale: float,
    tightness: float,
    decay: float,
    sinks: int,
    number: Tensor,
    offset: int,
    cap: Tensor,
    admissions: tuple[Tensor, Tensor],
    counters: Tensor,
    scratch: Tensor,
    escape: float = ESCAPE,
    shared_bytes: int = 0,
) -> None:
    """Score blocks, find the K best, mark the resident ones and choose what to load over which slots.

    `ops.summary.block_scores`, `ops.smoothing.smooth_scores` and `ops.eviction.select_blocks` in one kernel, one thread
    block per (entry, head). Summaries are read once where the logits fit into shared memory, and twice beyond.
    Entries with 0 candidates admit nothing and touch nothing else.

    Args:
        queries: [n, Q, H*G, D], contiguous; D is a multiple of 16, 256 at most.
        summaries: [S, H, N, R] uint8.
        fmt: how they are stored.
        rows: [n] int64.
        candidates: [n] int32, blocks [0, candidates) of each row may be chosen.
        maps: of the layer; `last_selected` is written.
        averages: [S, H, N] float32, updated; None ranks by the scores of this step alone.
        scale: softmax scale of the attention.
        tightness: factor of the half range.
        decay: weight of the past in the averages.
        sinks: blocks at the beginning that are always among the best.
        number: [1] int32, of the step.
        offset: resident blocks are marked as selected in 2 * number + offset.
        cap: [1] int32, most blocks admitted per (entry, head); C is another bound.
        admissions: blocks and slots, [n, H, C] int32 each, written; -1 where there is none.
        counters: [2] int64, admitted and deferred blocks are added.
        scratch: [n or more, H, N] float32, anything.
        escape: see `ops.smoothing`.
        shared_bytes: of shared memory at most, 0: all that the device has.

    Raises:
        ValueError: a shape, dtype or device is wrong.
        RuntimeError: the launch failed, or even the queries of a head do not fit into shared memory.
    """
    admitted, slots = admissions
    _module.fused_select(
        queries,
        summaries,
        fmt.bits,
        rows,
        candidates,
        *maps,
        averages,
        scale,
        tightness,
        decay,
        escape,
        sinks,
        number,
        offset,
        cap,
        admitted,
        slots,
        counters,
        scratch,
        shared_bytes,
    )
