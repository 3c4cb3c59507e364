from torchvision._absent import absent as __getattr__  # noqa: F401
from torchvision.transforms.functional import InterpolationMode

__all__ = ["InterpolationMode"]
