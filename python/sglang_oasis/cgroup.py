"""The control groups (cgroups, v1 and v2) whose limits apply to this process: its own groups and their ancestors."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple

PROC_SELF = Path("/proc/self")


class Mount(NamedTuple):
    """A mounted hierarchy of control groups.

    Attributes:
        version: 1 or 2.
        options: mount options; those of a v1 hierarchy include its controllers.
        group: the group that the mounted folder shows; in a container it is not always the root group.
        folder: mount point.
    """

    version: int
    options: frozenset[str]
    group: PurePosixPath
    folder: Path


def groups(controller: str, proc: Path = PROC_SELF) -> Iterator[tuple[int, Path]]:
    """(version, folder) of the process's group and of every ancestor that is visible, whose files hold the limits.

    Args:
        controller: "memory" or "cpu".
        proc: folder of the process in /proc.
    """
    try:
        membership, mounts = (proc / "cgroup").read_text(), (proc / "mountinfo").read_text()
    except OSError:
        return
    hierarchies = [mount for line in mounts.splitlines() if (mount := _mount(line)) is not None]
    for line in membership.splitlines():
        _, controllers, path = line.split(":", 2)
        version = 1 if controllers else 2
        if version == 1 and controller not in controllers.split(","):
            continue
        for mount in hierarchies:
            if mount.version == version and (version == 2 or controller in mount.options):
                yield from ((version, folder) for folder in _walk_up(mount, PurePosixPath(path)))


def _mount(line: str) -> Mount | None:
    """Parse a line of /proc/self/mountinfo; None unless it mounts control groups."""
    about, _, filesystem = line.partition(" - ")
    kind, _, options = filesystem.split(" ", 2)
    if kind not in ("cgroup", "cgroup2"):
        return None
    group, folder = (_unescaped(field) for field in about.split(" ")[3:5])
    return Mount(2 if kind == "cgroup2" else 1, frozenset(options.split(",")), PurePosixPath(group), Path(folder))


def _unescaped(field: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), field)


def _walk_up(mount: Mount, path: PurePosixPath) -> Iterator[Path]:
    inside = path.is_relative_to(mount.group)
    folder = mount.folder / path.relative_to(mount.group) if inside else mount.folder
    while folder != mount.folder:
        yield folder
        folder = folder.parent
    yield folder
