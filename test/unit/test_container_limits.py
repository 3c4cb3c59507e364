"""What a container leaves of the machine: memory, CPU time and places, by made-up trees of control groups."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from sglang_oasis import cpus
from sglang_oasis.seams import cpu_topology, launch_environment
from sglang_oasis.tier.host_memory import available


class Container:
    """A process's folder in /proc, and the hierarchies of control groups that it sees.

    Args:
        folder: where to make them.
        membership: content of /proc/self/cgroup.
        mounts: folder below "fs" -> (group that it shows, file system, options).
    """

    def __init__(self, folder: Path, membership: str, mounts: dict[str, tuple[str, str, str]]) -> None:
        self.fs, self.proc = folder / "control groups", folder / "proc"
        lines = ["22 1 254:0 / / rw,relatime - ext4 /dev/vda rw"]
        for name, (group, kind, options) in mounts.items():
            place = str(self.fs / name).replace(" ", "\\040")
            lines.append(f"31 22 0:27 {group} {place} ro,nosuid master:9 - {kind} {kind} rw,{options}")
        self.write(self.proc / "mountinfo", "\n".join(lines) + "\n")
        self.write(self.proc / "cgroup", membership)

    def group(self, name: str, **files: object) -> None:
        """Write files of a group; an underscore in front of a name's first dot stands for the dot."""
        for file, content in files.items():
            self.write(self.fs / name / file.replace("_", ".", 1), f"{content}\n")

    @staticmethod
    def write(file: Path, text: str) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)


V2 = {"": ("/", "cgroup2", "nsdelegate")}


def v1(controllers: str, group: str = "/") -> dict[str, tuple[str, str, str]]:
    return {controllers: (group, "cgroup", controllers)}


@pytest.fixture(autouse=True)
def sixty_four_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)))


@pytest.mark.parametrize(
    ("limits", "free"),
    [
        ({"memory_max": 5000}, 3800),
        ({"memory_max": "max", "memory_high": 4000}, 2800),
        ({"memory_max": 5000, "memory_high": 4000}, 2800),
        ({"memory_max": 5000, "memory_high": "max"}, 3800),
        ({"memory_max": 1000}, 0),
    ],
)
def test_free_memory_is_what_the_limits_leave_and_the_page_cache_counts_as_free(
    tmp_path: Path, limits: dict[str, object], free: int
) -> None:
    box = Container(tmp_path, "0::/\n", V2)
    statistics = "anon 900\ninactive_file 300\nactive_file 200\nfile 900\nshmem 400\nslab_reclaimable 100"
    box.group("", **limits, memory_current=1800, memory_stat=statistics)
    assert available.available_host_bytes(box.proc) == free


def test_the_tightest_of_nested_groups_counts(tmp_path: Path) -> None:
    box = Container(tmp_path, "0::/pod/box\n", V2)
    box.group("pod/box", memory_max="max", memory_current=100)
    box.group("pod", memory_max=5000, memory_current=1800)
    box.group("", memory_max=90000, memory_current=50000)
    assert available.available_host_bytes(box.proc) == 3200


@pytest.mark.parametrize(
    ("shown", "folder"),
    [("/", "docker/id/job"), ("/docker/id", "job"), ("/docker/id", "."), ("/elsewhere", ".")],
)
def test_version_1_limits_count_whatever_part_of_the_tree_the_container_sees(
    tmp_path: Path, shown: str, folder: str
) -> None:
    box = Container(tmp_path, "5:cpu,cpuacct:/docker/id\n4:memory:/docker/id/job\n0::/\n", v1("memory", shown))
    box.group(
        f"memory/{folder}",
        memory_limit_in_bytes=5000,
        memory_usage_in_bytes=1800,
        memory_stat="inactive_file 1\ntotal_inactive_file 300\ntotal_active_file 200",
    )
    assert available.available_host_bytes(box.proc) == 3700


def test_a_group_outside_the_namespace_is_bounded_by_what_is_visible(tmp_path: Path) -> None:
    box = Container(tmp_path, "0::/../neighbour\n", V2)
    box.group("", memory_max=5000, memory_current=1800)
    assert available.available_host_bytes(box.proc) == 3200


@pytest.mark.parametrize("limit", [None, "max", 9223372036854771712])
def test_without_a_limit_the_machine_decides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: object) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=7000))
    files = {} if limit is None else {"memory_max": limit, "memory_current": 5}
    box = Container(tmp_path, "0::/\n", V2)
    box.group("", **files)
    assert available.available_host_bytes(box.proc) == 7000
    assert available.available_host_bytes(tmp_path / "no proc") == 7000


@pytest.mark.parametrize(
    ("cpu_max", "usable"),
    [("200000 100000", 2), ("max 100000", 64), ("150000 100000", 1), ("5000 100000", 1), ("9900000 100000", 64)],
)
def test_threads_follow_the_time_that_a_container_gets(tmp_path: Path, cpu_max: str, usable: int) -> None:
    box = Container(tmp_path, "0::/pod/box\n", V2)
    box.group("pod/box", cpu_max="max 100000")
    box.group("pod", cpu_max=cpu_max)
    assert cpus.usable_cpus(box.proc) == usable


@pytest.mark.parametrize(("quota", "usable"), [(250000, 2), (-1, 64)])
def test_threads_follow_version_1_quotas(tmp_path: Path, quota: int, usable: int) -> None:
    box = Container(tmp_path, "5:cpu,cpuacct:/docker/id\n4:memory:/docker/id\n", v1("cpu,cpuacct", "/docker/id"))
    box.group("cpu,cpuacct", cpu_cfs_quota_us=quota, cpu_cfs_period_us=100000)
    assert cpus.usable_cpus(box.proc) == usable


def test_threads_follow_the_places_that_a_container_gets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {5, 9})
    assert cpus.usable_cpus(tmp_path / "no proc") == 2


@pytest.mark.parametrize(
    ("usable", "given", "threads"), [(2, None, "2"), (64, None, None), (2, "5", "5"), (64, "5", "5")]
)
def test_a_launch_bounds_threads_only_where_time_is_short_and_the_user_has_not_chosen(
    monkeypatch: pytest.MonkeyPatch, usable: int, given: str | None, threads: str | None
) -> None:
    monkeypatch.setattr(launch_environment, "usable_cpus", lambda: usable)
    monkeypatch.setenv("OMP_NUM_THREADS", given or "")
    if given is None:
        monkeypatch.delenv("OMP_NUM_THREADS")
    launch_environment.share_the_cores()
    assert os.environ.get("OMP_NUM_THREADS") == threads


def test_sglang_sees_the_cpus_of_its_container_only(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = [(0, 0, 0, 0), (1, 1, 0, 1), (2, 0, 0, 0), (3, 1, 0, 1)]  # two cores with two threads each
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {2, 3})
    assert cpu_topology.allowed_topology(lambda: machine) == [(2, 0, 0, 0), (3, 1, 0, 1)]


def test_without_lscpu_the_kernel_says_which_cpus_there_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {4, 70})
    monkeypatch.setattr(cpu_topology, "SYSFS", tmp_path)
    Container.write(tmp_path / "cpu4" / "topology" / "core_id", "2\n")
    Container.write(tmp_path / "cpu4" / "topology" / "physical_package_id", "1\n")
    (tmp_path / "cpu4" / "node1").mkdir()

    def no_lscpu() -> list[tuple[int, int, int, int]]:
        raise RuntimeError("Unexpected error running 'lscpu'")

    assert cpu_topology.allowed_topology(no_lscpu) == [(4, 2, 1, 1), (70, 70, 0, 0)]
