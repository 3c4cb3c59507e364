"""Streams that run nothing, and find what could run at once though it must not."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator
from typing import NamedTuple

MAIN = "main"


class Point(NamedTuple):
    """An event: the stream that recorded it, and how far it had seen every stream (a vector clock)."""

    stream: str
    seen: dict[str, int]


class Race(AssertionError):
    """Two accesses to the same memory, one of them a write, that no event orders."""


class RecordedStreams:
    """Keeps a vector clock per stream; an access must have seen all earlier ones that it conflicts with.

    Args:
        ignored: (waiting stream, recording stream) whose waits are left out, to see that they are needed.
    """

    def __init__(self, ignored: tuple[str, str] | None = None) -> None:
        self._ignored = ignored
        self._current = [MAIN]
        self._clocks: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
        self._writes: dict[Hashable, tuple[str, int]] = {}
        self._reads: dict[Hashable, dict[str, int]] = defaultdict(dict)

    @property
    def current(self) -> str:
        return self._current[-1]

    @contextlib.contextmanager
    def side(self, name: str) -> Iterator[None]:
        self._current.append(name)
        yield
        self._current.pop()

    def record(self) -> Point:
        return Point(self.current, dict(self._clocks[self.current]))

    def wait(self, event: object) -> None:
        assert isinstance(event, Point)
        if self._ignored != (self.current, event.stream):
            clock = self._clocks[self.current]
            for stream, time in event.seen.items():
                clock[stream] = max(clock[stream], time)

    def synchronize(self, event: object) -> None:
        """The host waits: it orders nothing on the device that is not ordered."""

    def access(self, reads: Iterable[Hashable] = (), writes: Iterable[Hashable] = ()) -> None:
        """Work on the current stream.

        Raises:
            Race: names the memory and both streams.
        """
        reads, writes = set(reads), set(writes)
        for memory in reads | writes:
            if memory in self._writes:
                self._require(memory, *self._writes[memory])
        for memory in writes:
            for stream, time in self._reads[memory].items():
                self._require(memory, stream, time)
        clock = self._clocks[self.current]
        clock[self.current] += 1
        for memory in reads:
            self._reads[memory][self.current] = clock[self.current]
        for memory in writes:
            self._writes[memory] = self.current, clock[self.current]
            self._reads[memory] = {}

    def _require(self, memory: Hashable, stream: str, time: int) -> None:
        if stream != self.current and self._clocks[self.current][stream] < time:
            raise Race(f"{memory} of stream {stream} is used by {self.current} without waiting")
