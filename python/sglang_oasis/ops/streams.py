"""Work beside the forward pass: side streams, and events that order them. On a CPU the calls run in their order."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from typing import Protocol

import torch

Event = object
"""A point in a stream; only the streams that recorded it look inside."""

FIRST = -1
"""CUDA priority: side streams have short work that a later layer waits for, the forward pass fills the rest."""


class Streams(Protocol):
    """The caller's stream and named side streams.

    Streams are ordered by events only: entering a side stream waits for nothing, and leaving it neither. Events that
    are recorded while a CUDA graph is captured become edges of the graph; a side stream joins the capture by waiting
    for an event of the captured stream, and must be waited for before the capture ends.
    """

    def side(self, name: str) -> AbstractContextManager[object]:
        """Within the block, the stream `name` is the current one."""

    def record(self) -> Event:
        """The point that the current stream has reached."""

    def wait(self, event: Event) -> None:
        """Nothing that the current stream does from here on begins before `event`."""

    def synchronize(self, event: Event) -> None:
        """The host waits for `event`."""


class SerialStreams:
    """For devices without streams: everything runs at once, in the order of the calls."""

    def side(self, name: str) -> AbstractContextManager[object]:
        return contextlib.nullcontext()

    def record(self) -> Event:
        return None

    def wait(self, event: Event) -> None:
        pass

    def synchronize(self, event: Event) -> None:
        pass


class CudaStreams:
    """Streams of a CUDA device.

    Args:
        device: the device.
        priority: of the side streams, lower runs first.
    """

    def __init__(self, device: torch.device, priority: int = FIRST) -> None:
        self._device = device
        self._priority = priority
        self._sides: dict[str, torch.cuda.Stream] = {}

    def side(self, name: str) -> AbstractContextManager[object]:
        if name not in self._sides:
            self._sides[name] = torch.cuda.Stream(self._device, self._priority)
        return torch.cuda.stream(self._sides[name])

    def record(self) -> Event:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event

    def wait(self, event: Event) -> None:
        assert isinstance(event, torch.cuda.Event)
        torch.cuda.current_stream(self._device).wait_event(event)

    def synchronize(self, event: Event) -> None:
        assert isinstance(event, torch.cuda.Event)
        event.synchronize()


def streams_of(device: torch.device) -> Streams:
    """The streams of a device."""
    return CudaStreams(device) if device.type == "cuda" else SerialStreams()
