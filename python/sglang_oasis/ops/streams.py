"""Side streams for work beside the forward pass, and events that order them. On a CPU all calls run in their order."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from typing import Protocol

import torch

Event = object
"""A point in a stream; only the `Streams` object that recorded it knows what it contains."""

FIRST = -1
"""CUDA priority: side streams run first, because their work is short and a later layer waits for it."""


class Streams(Protocol):
    """The caller's stream and named side streams.

    Only events order streams: neither entering nor leaving a side stream waits for anything. Events that
    are recorded while a CUDA graph is captured become edges of the graph; a side stream joins the capture by waiting
    for an event of the captured stream, and must be waited for before the capture ends.
    """

    def side(self, name: str) -> AbstractContextManager[object]:
        """Return a context in which the side stream `name` is the current stream."""

    def record(self) -> Event:
        """Return the point that the current stream has reached."""

    def wait(self, event: Event) -> None:
        """Let all later work of the current stream begin after `event`."""

    def synchronize(self, event: Event) -> None:
        """Let the host wait for `event`."""


class SerialStreams:
    """For devices without streams: every call runs immediately, in the order of the calls."""

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
        priority: priority of the side streams; a lower number runs first.
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
    """Return the streams of a device."""
    return CudaStreams(device) if device.type == "cuda" else SerialStreams()
