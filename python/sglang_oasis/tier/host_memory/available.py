"""Measures how much host memory a process may still take, inside a container or not."""

from __future__ import annotations

from pathlib import Path

import psutil

from sglang_oasis import cgroup

_LIMITS = {2: ("memory.max", "memory.high"), 1: ("memory.limit_in_bytes",)}
"""The limits of a control group; a process beyond `memory.high` is not killed, but almost stops."""
_USAGE = {2: "memory.current", 1: "memory.usage_in_bytes"}
_RECLAIMABLE = {
    2: ("inactive_file", "active_file", "slab_reclaimable"),
    1: ("total_inactive_file", "total_active_file"),
}
"""Fields of memory.stat with memory that the kernel counts as used, but frees when it is needed, such as the page cache
after a model was read. Memory in /dev/shm is not in these fields."""


def available_host_bytes(proc: Path = cgroup.PROC_SELF) -> int:
    """Return the free host memory in bytes, at most what the process's control groups still allow."""
    free = psutil.virtual_memory().available
    for version, folder in cgroup.groups("memory", proc):
        limits = [limit for name in _LIMITS[version] if (limit := _read_bytes(folder / name)) is not None]
        usage = _read_bytes(folder / _USAGE[version])
        if limits and usage is not None:
            usage -= _read_statistics(folder / "memory.stat", _RECLAIMABLE[version])
            free = min(free, max(0, min(limits) - usage))
    return free


def _read_bytes(file: Path) -> int | None:
    try:
        text = file.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _read_statistics(file: Path, names: tuple[str, ...]) -> int:
    """Return the sum of the statistics with these names."""
    try:
        lines = file.read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in lines if line.split(" ", 1)[0] in names)
