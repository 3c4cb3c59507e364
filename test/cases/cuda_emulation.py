"""The CUDA C++ kernels on a CPU, by test/cuda_on_cpu, in the place of those for a GPU."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tvm_ffi

from sglang_oasis.kernels import compiled
from sglang_oasis.kernels.cuda import native

ON_CPU = Path(__file__).resolve().parents[1] / "cuda_on_cpu"


def load() -> Any:
    """Build the kernels for the CPU, unless they are cached, and load them; skips without a compiler."""
    if shutil.which(os.environ.get("CXX", "c++")) is None:
        pytest.skip("no C++ compiler")
    extra = tuple(os.environ.get("SGLANG_OASIS_CPU_CFLAGS", "").split())
    cflags = ("-O2", "-Wall", "-Wno-unknown-pragmas", *extra)
    folders = (ON_CPU, compiled.source_folder("csrc/cuda"))
    recipe = compiled.Recipe("oasis_cuda_on_cpu", "CUDA kernels for tests", folders, cflags, ldflags=extra)
    return tvm_ffi.load_module(str(compiled.build(recipe)))


@contextlib.contextmanager
def emulated() -> Iterator[Any]:
    """The faces call the kernels for the CPU; yields their module."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "_module", load())
        yield native.kernels()
