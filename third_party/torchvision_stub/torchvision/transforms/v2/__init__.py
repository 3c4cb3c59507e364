from torchvision._absent import absent as __getattr__  # noqa: F401

from . import functional
from .functional import InterpolationMode

__all__ = ["InterpolationMode", "functional"]
