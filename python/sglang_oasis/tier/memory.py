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
    for limit_file, usage_file in _cgroup_files(cgroup_root, membership):
        limit, usage = _read_bytes(limit_file), _read_bytes(usage_file)
        if limit is not None and usage is not None:
            free = min(free, max(0, limit - usage))
    return free


def _cgroup_files(root: Path, membership: Path) -> Iterator[tuple[Path, Path]]:
    """(limit, usage) files of the process's cgroup and of each of its ancestors."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            yield from _walk_up(root, path, "memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            yield from _walk_up(root / "memory", path, "memory.limit_in_bytes", "memory.usage_in_bytes")


def _walk_up(root: Path, path: str, limit: str, usage: str) -> Iterator[tuple[Path, Path]]:
    folder = root / path.lstrip("/")
    while True:
        yield folder / limit, folder / usage
        if folder == root or root not in folder.parents:
            return
        folder = folder.parent


def _read_bytes(file: Path) -> int | None:
    try:
        text = file.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None
