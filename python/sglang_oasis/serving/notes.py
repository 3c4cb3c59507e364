"""What one hook tells another, or an attention backend: beside SGLang's objects, not on them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary


@dataclass
class Notes:
    """About the newest batch of one model runner; from the host's view, where SGLang's batch is on the device.

    Attributes:
        rows: row of each request.
        last_chunks: of an extend batch, per request: whether this is its last prefill chunk. None: nobody has noted it.
    """

    rows: list[int] | None = None
    last_chunks: list[bool] | None = None


_of_runner: WeakKeyDictionary[Any, Notes] = WeakKeyDictionary()


def notes_of(runner: Any) -> Notes:
    """The notes of a model runner, the same object each time."""
    return _of_runner.setdefault(runner, Notes())


class DeviceBudget:
    """Device memory for the rows of this process's model, on which all ranks have agreed."""

    def __init__(self) -> None:
        self._bytes: int | None = None

    def set(self, size: int) -> None:
        self._bytes = size

    def get(self) -> int:
        """In bytes.

        Raises:
            RuntimeError: the memory has not been divided yet.
        """
        if self._bytes is None:
            raise RuntimeError("the device memory is divided when SGLang sizes its KV pool, and it has not yet.")
        return self._bytes


device_budget = DeviceBudget()
