"""How many CPUs this process may use, inside a container or not, and what they can do."""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path

import torch

from sglang_oasis import cgroup

CPUINFO = Path("/proc/cpuinfo")


def allowed_cpus() -> int:
    """Number of CPUs that this process may run on, after a container's `--cpuset-cpus`."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def instruction_sets(cpuinfo: Path = CPUINFO) -> str:
    """Name of what compiled code may rely on: torch's own choice, and a digest of all that the CPU has.

    Equal names mean that code compiled by torch for one CPU runs on the other, such as "AVX512-0f3c21aa".
    """
    has = re.search(r"^(?:flags|Features)\s*:(.*)$", cpuinfo.read_text() if cpuinfo.exists() else "", re.MULTILINE)
    words = sorted(has[1].split()) if has else []
    digest = hashlib.sha256(" ".join(words).encode()).hexdigest()[:8]
    return f"{torch.backends.cpu.get_cpu_capability()}-{digest}".replace(" ", "-")


def usable_cpus(proc: Path = cgroup.PROC_SELF) -> int:
    """Number of CPUs that this process can keep busy: those it may run on, at most its quota of CPU time.

    A container's `--cpus 2` limits CPU time, not the number of CPUs: 64 threads on 64 CPUs use up the time of a period
    early, and all of them stop until the next one. Rounds down, which leaves a fraction of a CPU to other threads.
    """
    usable = float(allowed_cpus())
    for version, folder in cgroup.groups("cpu", proc):
        quota = _quota(folder / "cpu.max") if version == 2 else _quota_v1(folder)
        usable = usable if quota is None else min(usable, quota)
    return max(1, int(usable))


def _quota(file: Path) -> float | None:
    """CPUs by a file such as "200000 100000" (microseconds of quota and period); None for "max 100000"."""
    try:
        quota, period = file.read_text().split()
    except (OSError, ValueError):
        return None
    return int(quota) / int(period) if quota.isdigit() and int(period) > 0 else None


def _quota_v1(folder: Path) -> float | None:
    try:
        quota, period = (int((folder / f"cpu.cfs_{name}_us").read_text()) for name in ("quota", "period"))
    except (OSError, ValueError):
        return None
    return quota / period if quota > 0 and period > 0 else None
