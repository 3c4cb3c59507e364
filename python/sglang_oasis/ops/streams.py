"""Side streams of a device and the events that order them, also while a CUDA graph is captured."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

Event = Any
"""What `Streams.record` returns; only `Streams.wait` looks into it."""


class Streams(Protocol):
    """The streams of one device."""

    def side(self, name: str) -> AbstractContextManager[Any]:
        """Make the side stream of that name the current one, for what is launched within."""

    def record(self) -> Event:
        """Mark what the current stream has been given so far."""

    def wait(self, event: Event) -> None:
        """Let the current stream wait for what the event marks; the host does not wait."""


class CudaStreams:
    """Streams of a CUDA device, made when they are first named.

    Work that is captured into a graph must be waited for by the capturing stream before the capture ends.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._sides: dict[str, torch.cuda.Stream] = {}

    def side(self, name: str) -> AbstractContextManager[Any]:
        if name not in self._sides:
            self._sides[name] = torch.cuda.Stream(self._device)
        return torch.cuda.stream(self._sides[name])

    def record(self) -> Event:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event

    def wait(self, event: Event) -> None:
        torch.cuda.current_stream(self._device).wait_event(event)


class SerialStreams:
    """One stream that does everything in the order in which it was asked: a CPU."""

    def side(self, name: str) -> AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def record(self) -> Event:
        return None

    def wait(self, event: Event) -> None:
        pass
