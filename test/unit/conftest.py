"""Fixtures that several unit tests use."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from typing import Any

import pytest
import torch

os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported: its kernels are what our CPU ops are compared with

from sglang_oasis.kernels.cpu import native
from sglang_oasis.kernels.cpu import overrides as _overrides  # noqa: F401  (importing it puts the kernels in the references' place)
from test.cases.kernel_cases import ANY_CPU, THREADS


@pytest.fixture(scope="module")
def kernels() -> Iterator[Any]:
    """The kernels, on several threads; torch, which only computes references here, on one."""
    if shutil.which(os.environ.get("CXX", "c++")) is None:
        pytest.skip("no C++ compiler")
    was_loaded, threads = native.kernels() is not None, torch.get_num_threads()
    module = native.load()
    assert module is not None
    module.configure_threads(THREADS, ANY_CPU)
    torch.set_num_threads(1)
    yield module
    module.configure_threads(threads, ANY_CPU)
    torch.set_num_threads(threads)
    if not was_loaded:
        native.unload()
