"""Builds the C++ kernels for CPUs, once per version of their sources and into a cache folder, and loads them.

`python -m sglang_oasis.kernels.cpu.native` builds them ahead of the first server.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch

from sglang_oasis.kernels import compiled

logger = logging.getLogger(__name__)

NAME = "oasis_cpu"
CFLAGS = ("-O3", "-ffp-contract=fast", "-fno-math-errno", "-Wall", "-Wextra", "-Wno-psabi")

_CPUS = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
"""CPUs of this process, read at import, because an OpenMP runtime may later bind the main thread to one of them."""

T = TypeVar("T")

_module: Any = None
_attempted = False


def kernels() -> Any:
    """Return the loaded kernels, a module of tvm_ffi functions; None where they are absent and plain torch is used."""
    return _module


def load() -> Any:
    """Load the kernels, after building them if they are not in the cache; None, and a warning, if that fails.

    `SGLANG_OASIS_CPU_KERNELS=0` turns them off.
    """
    global _module, _attempted
    if not _attempted:
        _attempted = True
        _module = _attempt(_load)
    return _module


def prepare() -> Path | None:
    """Build the kernels if they are not in the cache, for processes that load them later; warns like `load`."""
    return _attempt(build)


def unload() -> None:
    """Return to plain torch; `load` loads the kernels again."""
    global _module, _attempted
    _module, _attempted = None, False


def source_folder() -> Path:
    """Return the folder of the C++ sources."""
    return compiled.source_folder("csrc/cpu")


def build() -> Path:
    """Compile the kernels unless they are in the cache.

    `SGLANG_OASIS_CPU_CFLAGS` holds further flags for the compiler and the linker; `scripts/sanitize.sh` sets it.

    Returns:
        The shared library.

    Raises:
        RuntimeError: the kernels do not compile; the message is that of the compiler.
        CacheError: there is not enough disk space for them.
    """
    extra = tuple(os.environ.get("SGLANG_OASIS_CPU_CFLAGS", "").split())
    return compiled.build(
        compiled.Recipe(
            NAME,
            title="CPU kernels",
            folders=(source_folder(),),
            cflags=(*CFLAGS, *extra),
            ldflags=extra,
            compiler=os.environ.get("CXX", "c++"),
        )
    )


def _attempt(action: Callable[[], T]) -> T | None:
    if os.environ.get("SGLANG_OASIS_CPU_KERNELS", "1") == "0":
        logger.warning("SGLANG_OASIS_CPU_KERNELS is 0: plain torch replaces the CPU kernels, which is much slower.")
        return None
    try:
        return action()
    except Exception as error:  # whatever the error is, the references can serve
        reason = compiled.reason(error)
        logger.warning("The CPU kernels cannot be used, so plain torch is used, which is much slower: %s.", reason)
        return None


def _load() -> Any:
    import tvm_ffi

    module = tvm_ffi.load_module(str(build()))
    instruction_set = module.instruction_set()  # an unknown one fails here, and not in a thread
    module.configure_threads(torch.get_num_threads(), torch.tensor(_CPUS, dtype=torch.int64))
    logger.info("CPU kernels for %s with %d threads.", instruction_set, torch.get_num_threads())
    return module


if __name__ == "__main__":
    logging.basicConfig(format="%(message)s", level=logging.INFO)
    loaded = load()
    if loaded is None:
        sys.exit(1)
    print(f"CPU kernels: {loaded.instruction_set()}, {torch.get_num_threads()} threads, {build()}")
