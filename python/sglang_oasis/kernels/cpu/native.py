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
"""CPUs of this process. Read at import: an OpenMP runtime may later bind the main thread to one of them."""

T = TypeVar("T")

_module: Any = None
_attempted = False


def kernels() -> Any:
    """The loaded kernels, a module of tvm_ffi functions; None where they are absent and plain torch does the work."""
    return _module


def load() -> Any:
    """Build the kernels if they are not in the cache, and load them; None, and a warning, where that is impossible.

    `SGLANG_OASIS_CPU_KERNELS=0` leaves them out.
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
    """Go back to plain torch; a later `load` loads again."""
    global _module, _attempted
    _module, _attempted = None, False


def source_folder() -> Path:
    """The C++ sources."""
    return compiled.source_folder("csrc/cpu")


def build() -> Path:
    """Compile the kernels unless the cache has them.

    `SGLANG_OASIS_CPU_CFLAGS` has more flags for the compiler and the linker, as `scripts/sanitize.sh` needs them.

    Returns:
        The shared library.

    Raises:
        RuntimeError: they do not compile; the message is the compiler's.
        CacheError: there is no room for them.
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
        logger.warning("SGLANG_OASIS_CPU_KERNELS is 0: plain torch does the work of the CPU kernels, much slower.")
        return None
    try:
        return action()
    except Exception as error:  # whatever is wrong with them, there are the references
        reason = compiled.reason(error)
        logger.warning("The CPU kernels cannot be used, plain torch does it, much slower: %s.", reason)
        return None


def _load() -> Any:
    import tvm_ffi

    module = tvm_ffi.load_module(str(build()))
    instruction_set = module.instruction_set()  # fails here, and not in a thread, where a wrong one was asked for
    module.configure_threads(torch.get_num_threads(), torch.tensor(_CPUS, dtype=torch.int64))
    logger.info("CPU kernels for %s with %d threads.", instruction_set, torch.get_num_threads())
    return module


if __name__ == "__main__":
    logging.basicConfig(format="%(message)s", level=logging.INFO)
    loaded = load()
    if loaded is None:
        sys.exit(1)
    print(f"CPU kernels: {loaded.instruction_set()}, {torch.get_num_threads()} threads, {build()}")
