"""Environment variables for debugging and research, and those by which our own processes inform each other."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from sglang_oasis.errors import LookaheadKVError


@dataclass(frozen=True)
class DebugEnv:
    """Debug switches, read once per scheduler process.

    Attributes:
        trace_dir: `SGLANG_OASIS_TRACE_DIR`, a folder that receives the selection of every decode step, or None.
        integrity_interval: `SGLANG_OASIS_CHECK_INTEGRITY`, check every invariant of the tiers each N decode steps
            (0: never). A violated invariant ends the scheduler.
        device_path: `SGLANG_OASIS_DEVICE_PATH=1`, run the CUDA device's code path on a CPU, with the ops' references.
    """

    trace_dir: Path | None
    integrity_interval: int
    device_path: bool

    @classmethod
    def read(cls) -> DebugEnv:
        interval = os.environ.get("SGLANG_OASIS_CHECK_INTEGRITY", "0")
        if not interval.isdigit():
            raise LookaheadKVError(
                f"SGLANG_OASIS_CHECK_INTEGRITY must be a number of decode steps (0 = off), got {interval!r}."
            )
        trace_dir = os.environ.get("SGLANG_OASIS_TRACE_DIR")
        return cls(
            trace_dir=Path(trace_dir) if trace_dir else None,
            integrity_interval=int(interval),
            device_path=os.environ.get("SGLANG_OASIS_DEVICE_PATH", "0") == "1",
        )


FREE_AT_LAUNCH = "SGLANG_OASIS_FREE_HOST_BYTES"
"""Free host memory in bytes when the launcher started; the launcher sets it for its data-parallel replicas."""


def note_free_at_launch(size: int) -> None:
    os.environ[FREE_AT_LAUNCH] = str(size)


def free_at_launch() -> int | None:
    """Host memory in bytes that was free when the launcher started; None if no launcher has recorded it."""
    noted = os.environ.get(FREE_AT_LAUNCH)
    return None if noted is None else int(noted)
