"""Import stub: text-only SGLang needs torchvision's names at import time and never calls them. See ../README.md."""

from . import io, transforms

__all__ = ["io", "transforms"]
__version__ = "0.0.0+stub"
