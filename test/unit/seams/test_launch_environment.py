"""Ranks that are more than NUMA nodes get cores of their own, kinds of CPUs caches; what a user has set stays."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import torch
from sglang.srt.environ import third_party_cache_defaults
from sglang.srt.utils import numa_utils

from sglang_oasis.cpus import instruction_sets
from sglang_oasis.seams import launch_environment
from sglang_oasis.seams.launch_environment import cache_compiled_code_by_cpu, divide_cores

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


CPUINFO = "processor\t: 0\nflags\t\t: fpu sse2 avx2{more}\n\nprocessor\t: 1\nflags\t\t: fpu\n"


def test_compiled_code_is_kept_by_what_the_cpu_can_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    default = third_party_cache_defaults()["TORCHINDUCTOR_CACHE_DIR"]
    folders = set()
    for capability, more in (("AVX2", ""), ("AVX512", ""), ("AVX512", " amx_tile")):
        cpuinfo = tmp_path / "cpuinfo"
        cpuinfo.write_text(CPUINFO.format(more=more))
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)  # noqa: B023
        monkeypatch.setattr(launch_environment, "instruction_sets", lambda: instruction_sets(cpuinfo))  # noqa: B023
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", default)
        cache_compiled_code_by_cpu()
        cache_compiled_code_by_cpu()  # an Engine after another
        folders.add(os.environ["TORCHINDUCTOR_CACHE_DIR"])
    assert len(folders) == 3
    assert all(re.fullmatch(rf"{re.escape(default)}-AVX\d+-[0-9a-f]{{8}}", folder) for folder in folders)


def test_a_users_folder_for_compiled_code_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/mine")
    cache_compiled_code_by_cpu()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "/mine"


def test_a_machine_without_cpuinfo_has_a_name(tmp_path: Path) -> None:
    assert instruction_sets(tmp_path / "missing").startswith(torch.backends.cpu.get_cpu_capability())
