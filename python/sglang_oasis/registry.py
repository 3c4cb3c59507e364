"""Finds extensions, such as selectors and sources, by name, in this package or in another one.

Another package adds to a registry by an entry point in the registry's group; its name is the value of the flag:

    [project.entry-points."sglang_oasis.selectors"]
    mine = "my_package:my_selector"
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Generic, TypeVar

from sglang_oasis.errors import LookaheadKVError

T = TypeVar("T")


class Registry(Generic[T]):
    """The objects that one flag chooses from, by name.

    Args:
        flag: the flag.
        group: entry-point group through which other packages add objects.
    """

    def __init__(self, flag: str, group: str) -> None:
        self._flag, self._group = flag, group
        self._found: dict[str, T] = {}

    def register(self, name: str) -> Callable[[T], T]:
        """Decorator: make the decorated object available under a name."""

        def decorate(entry: T) -> T:
            self._found[name] = entry
            return entry

        return decorate

    def names(self) -> list[str]:
        """All names that may be chosen, including those of other packages."""
        return sorted({*self._found, *(point.name for point in entry_points(group=self._group))})

    def find(self, name: object) -> T:
        """The object that is registered under a name; this package's own objects take precedence.

        Raises:
            LookaheadKVError: no object has this name, or the object cannot be imported.
        """
        if isinstance(name, str) and name in self._found:
            return self._found[name]
        for point in entry_points(group=self._group):
            if point.name == name:
                return self._found.setdefault(point.name, self._load(point.name, point.load))
        raise LookaheadKVError(f"{self._flag} must be one of {', '.join(self.names())}, got {name}.")

    def _load(self, name: str, load: Callable[[], T]) -> T:
        try:
            return load()
        except Exception as error:  # another package's code
            raise LookaheadKVError(
                f"{self._flag} {name} cannot be imported ({type(error).__name__}: {error}): "
                f"repair or remove the package that provides it."
            ) from error
