"""The ops of a device, and how to run what is registered for CUDA on tensors of another kind."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

from sglang_oasis.kernels.cuda import native, overrides
from sglang_oasis.ops import device_step, prediction, staging, tokens
from sglang_oasis.ops.dispatch import DeviceOp

_MODULES = (overrides, device_step, prediction, staging, tokens)
OPS = list({id(op): op for module in _MODULES for op in vars(module).values() if isinstance(op, DeviceOp)}.values())


@contextlib.contextmanager
def cuda_ops_on(device_type: str, kernels: Any = None) -> Iterator[None]:
    """Ops on tensors of `device_type` do what they do on CUDA; with the C++ `kernels`, or without them."""
    with contextlib.ExitStack() as stack:
        for op in OPS:
            stack.enter_context(mock.patch.dict(op._by_device))
        stack.enter_context(mock.patch.multiple(native, _module=kernels, _attempted=True))
        overrides.install()
        for op in OPS:
            if "cuda" in op._by_device:
                op.register(device_type)(op._by_device["cuda"])
        yield
