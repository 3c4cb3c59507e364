"""Which CUDA stream waits for what; with stand-ins for torch's streams, as there may be no GPU."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch

from sglang_oasis.ops.streams import CudaStreams, SerialStreams, streams_of

DEVICE = torch.device("cuda", 1)


class Stream:
    """Notes the events that it waits for."""

    def __init__(self, device: torch.device, priority: int = 0) -> None:
        self.device, self.priority = device, priority
        self.waited: list[object] = []

    def wait_event(self, event: object) -> None:
        self.waited.append(event)


class Event:
    """Notes the stream that recorded it."""

    def record(self, stream: Stream) -> None:
        self.stream = stream


@pytest.fixture
def main(monkeypatch: pytest.MonkeyPatch) -> Stream:
    """The stream that is current outside of all side streams."""
    current = [Stream(DEVICE)]

    @contextlib.contextmanager
    def enter(stream: Stream) -> Iterator[None]:
        current.append(stream)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "stream", enter)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current[-1])
    return current[0]


def test_events_belong_to_the_stream_that_is_current(main: Stream) -> None:
    streams = CudaStreams(DEVICE)
    begun = streams.record()
    with streams.side("copies"):
        streams.wait(begun)
        done = streams.record()
    with streams.side("copies"):
        again = streams.record()
    with streams.side("others"):
        other = streams.record()
    streams.wait(done)
    assert isinstance(begun, Event)
    assert isinstance(done, Event)
    assert isinstance(again, Event)
    assert isinstance(other, Event)
    assert begun.stream is main
    assert done.stream is again.stream is not main
    assert other.stream not in (main, done.stream)
    assert (main.waited, done.stream.waited, other.stream.waited) == ([done], [begun], [])
    assert done.stream.device == DEVICE
    assert done.stream.priority < main.priority


def test_a_cpu_does_everything_in_the_order_of_the_calls() -> None:
    streams = streams_of(torch.device("cpu"))
    assert isinstance(streams, SerialStreams)
    with streams.side("copies"):
        event = streams.record()
    streams.wait(event)
