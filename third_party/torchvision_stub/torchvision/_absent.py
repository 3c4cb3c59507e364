"""Stands in for every torchvision function and class that is not there."""

from collections.abc import Callable
from typing import NoReturn


def absent(name: str) -> Callable[..., NoReturn]:
    """Return a callable that fails when called. Meant as the module-level ``__getattr__`` of the stub's modules."""
    if name.startswith("__"):
        raise AttributeError(name)

    def fail(*args: object, **kwargs: object) -> NoReturn:
        raise NotImplementedError(
            f"torchvision's {name} is not available here because only its import stub is installed; "
            "replace torchvision-import-stub by torchvision to process images."
        )

    fail.__name__ = name
    return fail
