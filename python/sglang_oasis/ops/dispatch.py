"""Chooses the implementation of an op by the device of its tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Generic, ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


class DeviceOp(Generic[P, R]):
    """A function with a plain-torch reference that a device type can override.

    The device of the first tensor, among the arguments or in a tuple argument, chooses the implementation; a device
    without an override, or whose override returns NotImplemented for the call, runs the reference.
    """

    def __init__(self, reference: Callable[P, R]) -> None:
        self.reference = reference
        self.__doc__ = reference.__doc__
        self.__name__ = reference.__name__
        self._by_device: dict[str, Callable[P, R]] = {}

    def register(self, device_type: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
        """Return a decorator that registers a function for tensors on `device_type` ("cpu", "cuda")."""

        def decorate(implementation: Callable[P, R]) -> Callable[P, R]:
            self._by_device[device_type] = implementation
            return implementation

        return decorate

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        override = self._by_device.get(_device_of(args))
        if override is not None:
            result = override(*args, **kwargs)
            if result is not NotImplemented:
                return result
        return self.reference(*args, **kwargs)


def _device_of(arguments: Iterable[object]) -> str:
    for argument in arguments:
        if isinstance(argument, torch.Tensor):
            return argument.device.type
        if isinstance(argument, tuple) and (device := _device_of(argument)):
            return device
    return ""


def device_op(reference: Callable[P, R]) -> DeviceOp[P, R]:
    """Turn a plain-torch reference into a dispatched op (a decorator)."""
    return DeviceOp(reference)
