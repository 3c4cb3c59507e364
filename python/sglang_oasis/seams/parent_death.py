"""Makes every process of a server end when its parent ends, from the start of the process on.

SGLang's processes ask the kernel for this, too (`utils/common.kill_itself_when_parent_died`), but only after they have
imported everything, which takes many seconds, and they do not notice a parent that has ended before.

Read from Python 3.11 and 3.12: `multiprocessing/spawn.get_preparation_data` (AFTER: a spawned process unpickles its
result before anything else, and ignores keys that it does not know). Read from sglang 0.5.23:
`entrypoints/engine.Engine._launch_scheduler_processes`, `Engine._launch_detokenizer_subprocesses` (AROUND: a program
that uses an Engine may spawn processes of its own, which must not be changed). A data-parallel controller is one of
these processes, and spawns schedulers. Remove this when upstream does the same as soon as its processes start.
"""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

from sglang_oasis.seams.seam import Seam

_PR_SET_PDEATHSIG = 1
_KEY = "sglang_oasis_parent"

_launching: ContextVar[bool] = ContextVar("launching", default=False)
_armed = False
"""Whether this process ends with its parent, and so do those that it spawns."""


class _Parent:
    """Calls `end_with` in a child process when the child unpickles it."""

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def __reduce__(self) -> tuple[Callable[[int], None], tuple[int]]:
        return end_with, (self.pid,)


def end_with(parent: int) -> None:
    """Let the kernel end this process when its parent, the process `parent`, ends, or now if it has ended already."""
    global _armed
    _armed = True
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def _arm_child(preparation: dict[str, Any], *args: Any, **kwargs: Any) -> dict[str, Any]:
    if _armed or _launching.get():
        preparation[_KEY] = _Parent(os.getpid())
    return preparation


def _launch(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    token = _launching.set(True)
    try:
        return original(*args, **kwargs)
    finally:
        _launching.reset(token)


SEAMS = [
    Seam("multiprocessing.spawn.get_preparation_data", _arm_child, "AFTER"),
    Seam("entrypoints.engine.Engine._launch_scheduler_processes", _launch, "AROUND"),
    Seam("entrypoints.engine.Engine._launch_detokenizer_subprocesses", _launch, "AROUND"),
]
