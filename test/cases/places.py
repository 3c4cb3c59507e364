"""Where a test's kernels run: the same cases on a CPU, by an interpreter or an emulation, and on a GPU."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import NamedTuple, TypeVar
from unittest import mock

import torch
from torch import Tensor

from sglang_oasis.ops import device_step, prediction, staging, tokens
from sglang_oasis.ops.dispatch import DeviceOp
from sglang_oasis.tier.host_memory.pinned import pinned_allocator
from sglang_oasis.tier.host_pool import Allocate, pageable

T = TypeVar("T", bound=tuple)  # type: ignore[type-arg]


class Place(NamedTuple):
    """A device, and host memory that it reaches by address.

    Attributes:
        device: the device.
        allocate: makes zeroed host memory.
    """

    device: torch.device
    allocate: Allocate

    def put(self, tensor: Tensor) -> Tensor:
        """A copy on the device, with the same strides."""
        copy = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=self.device)
        return copy.copy_(tensor)

    def put_all(self, tensors: T) -> T:
        """The same of every tensor in a named tuple."""
        return type(tensors)(*(self.put(x) if isinstance(x, Tensor) else x for x in tensors))

    def pin(self, tensor: Tensor) -> Tensor:
        """A contiguous copy in host memory."""
        return self.allocate(tuple(tensor.shape), tensor.dtype).copy_(tensor)


CPU = Place(torch.device("cpu"), pageable)


def place_of(device: torch.device) -> Place:
    """A GPU with pinned memory, or the CPU."""
    return Place(device, pinned_allocator(device)) if device.type == "cuda" else CPU


@contextlib.contextmanager
def kernels_everywhere() -> Iterator[None]:
    """What a GPU's tensors get, a CPU's tensors get too: Triton's kernels, under TRITON_INTERPRET=1."""
    from sglang_oasis.kernels.cuda import overrides

    overrides.install()
    with contextlib.ExitStack() as stack:
        for module in (device_step, prediction, staging, tokens):
            for op in vars(module).values():
                if isinstance(op, DeviceOp) and "cuda" in op._by_device:
                    stack.enter_context(mock.patch.dict(op._by_device, cpu=op._by_device["cuda"]))
        yield
