"""Builds the CUDA C++ kernels for the CPU."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import tvm_ffi

from sglang_oasis.ops import compiled


def load() -> Any:
    """The kernels, as `sglang_oasis.ops.cuda_kernels` has them; they take CPU tensors."""
    extra = tuple(os.environ.get("SGLANG_OASIS_CPU_CFLAGS", "").split())
    cflags = ("-O2", "-Wall", "-Wno-unknown-pragmas", *extra)
    folders = (Path(__file__).parent, compiled.source_folder("cuda"))
    recipe = compiled.Recipe("oasis_cuda_on_cpu", "CUDA kernels for tests", folders, cflags, ldflags=extra)
    return tvm_ffi.load_module(str(compiled.build(recipe)))
