"""Makes the Triton kernels, from the checkout or from a wheel's data files, importable as the package oasis_triton."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

from sglang_oasis.kernels import compiled

NAME = "oasis_triton"


def source_folder() -> Path:
    """Return the folder of the Triton sources."""
    return compiled.source_folder("triton")


def load() -> None:
    """Make `import oasis_triton` work; nothing is compiled before a kernel is launched.

    Raises:
        ImportError: the sources are absent.
    """
    if NAME in sys.modules:
        return
    folder = source_folder()
    spec = importlib.util.spec_from_file_location(
        NAME, folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    if spec is None or spec.loader is None or not (folder / "__init__.py").is_file():
        raise ImportError(f"The Triton kernels are not in {folder}: install sglang-oasis again.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[NAME] = module
    spec.loader.exec_module(module)
