"""Ranks that are more than NUMA nodes get cores of their own; what a user has set stays."""

from __future__ import annotations

import os

import pytest
from sglang.srt.utils import numa_utils

from sglang_oasis.seams.launch_environment import divide_cores

VARIABLES = ("SGLANG_CPU_OMP_THREADS_BIND", "OMP_NUM_THREADS")


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Five cores that this process may use, on one node."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {2, 3, 4, 8, 9})
    monkeypatch.setattr(numa_utils, "get_cpu_ids_by_node", lambda: ["0-15"])
    for name in VARIABLES:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


@pytest.mark.parametrize(
    ("ranks", "binding", "threads"),
    [(1, None, None), (2, "2,3|4,8", "2"), (5, "2|3|4|8|9", "1"), (7, "2|3|4|8|9|2|3", "1")],
)
def test_cores_are_divided(ranks: int, binding: str | None, threads: str | None) -> None:
    divide_cores(ranks)
    assert [os.environ.get(name) for name in VARIABLES] == [binding, threads]


def test_a_users_choice_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.setenv(name, "mine")
    divide_cores(2)
    assert [os.environ[name] for name in VARIABLES] == ["mine", "mine"]


def test_one_rank_per_node_is_left_to_sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numa_utils, "get_cpu_ids_by_node", lambda: ["0-7", "8-15"])
    divide_cores(2)
    assert "SGLANG_CPU_OMP_THREADS_BIND" not in os.environ
