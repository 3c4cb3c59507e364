"""How much host memory a process may still take, inside a container or not."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psutil

CGROUP_ROOT = Path("/sys/fs/cgroup")
PROC_SELF_CGROUP = Path("/proc/self/cgroup")


def available_host_bytes(cgroup_root: Path = CGROUP_ROOT, membership: Path = PROC_SELF_CGROUP) -> int:
    """Free host memory in bytes, never more than what the process's cgroups (v1 or v2) still allow."""
    free = psutil.virtual_memory().available
    for limit_file, usage_file, reclaimable in _cgroup_files(cgroup_root, membership):
        limit, usage = _read_bytes(limit_file), _read_bytes(usage_file)
        if limit is not None and usage is not None:
            usage -= _read_statistic(limit_file.parent / "memory.stat", reclaimable)
            free = min(free, max(0, limit - usage))
    return free


def _cgroup_files(root: Path, membership: Path) -> Iterator[tuple[Path, Path, str]]:
    """(limit file, usage file, name in memory.stat of the reclaimable page cache) of the cgroup and its ancestors.

    The kernel counts the page cache as used, and reading a model fills it.
    """
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            for folder in _walk_up(root, path):
                yield folder / "memory.max", folder / "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            for folder in _walk_up(root / "memory", path):
                yield folder / "memory.limit_in_bytes", folder / "memory.usage_in_bytes", "total_inactive_file"


def _walk_up(root: Path, path: str) -> Iterator[Path]:
    folder = root / path.lstrip("/")
    while True:
        yield folder
        if folder == root or root not in folder.parents:
            return
        folder = folder.parent


def _read_bytes(file: Path) -> int | None:
    try:
        text = file.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _read_statistic(file: Path, name: str) -> int:
    try:
        lines = file.read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith(f"{name} ")), 0)
