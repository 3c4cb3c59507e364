"""Data that hooks pass to each other and to attention backends, without new attributes on SGLang's objects."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary


@dataclass
class Notes:
    """Facts about the newest batch of one model runner, on the host, because SGLang's batch has them on the device.

    Attributes:
        rows: row of each request.
        last_chunks: for an extend batch, whether each request is in its last prefill chunk; None if not noted.
    """

    rows: list[int] | None = None
    last_chunks: list[bool] | None = None


_of_runner: WeakKeyDictionary[Any, Notes] = WeakKeyDictionary()


def notes_of(runner: Any) -> Notes:
    """Return the notes of a model runner, always the same object."""
    return _of_runner.setdefault(runner, Notes())


class DeviceBudget:
    """The device memory for the rows of this process's model, on which all ranks have agreed."""

    def __init__(self) -> None:
        self._bytes: int | None = None

    def set(self, size: int) -> None:
        self._bytes = size

    def get(self) -> int:
        """Return the device memory in bytes.

        Raises:
            RuntimeError: the memory has not been divided yet.
        """
        if self._bytes is None:
            raise RuntimeError("The device memory is not divided yet: SGLang must size its KV pool first.")
        return self._bytes


device_budget = DeviceBudget()
