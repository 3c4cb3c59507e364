"""Every Triton kernel compiles for GPUs that are not there; in a process of its own, without Triton's interpreter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.kernel_reports.compile_report import ARCHITECTURES, Compiled, every_launch, table
from scripts.kernel_reports.workload import WORKLOADS

HOT = {"take_tokens", "estimate", "rank", "select_admissions", "fetch_blocks", "attend", "stage_pages", "write_back"}


def report(arguments: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
    inherited = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "scripts.kernel_reports.compile_report", *arguments]
    return subprocess.run(command, env=inherited | environment, capture_output=True, text=True)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> list[Compiled]:
    file: Path = tmp_path_factory.mktemp("report") / "kernels.json"
    ran = report(["--json", str(file)])
    assert ran.returncode == 0, ran.stderr
    results = [Compiled(**result) for result in json.loads(file.read_text())]
    assert ran.stdout == table(results) + "\n"
    return results


def test_every_kernel_compiles_for_every_architecture(compiled: list[Compiled]) -> None:
    wanted = {
        (name, launch.kernel.__name__, architecture)
        for name, load in WORKLOADS.items()
        for launch in every_launch(load)
        for architecture in ARCHITECTURES
    }
    assert {result[:3] for result in compiled} == wanted
    assert {result.kernel for result in compiled} >= HOT


def test_no_hot_kernel_spills_registers(compiled: list[Compiled]) -> None:
    assert [result for result in compiled if result.kernel in HOT and result.spilled] == []


def test_fetched_chunks_move_in_vectors_of_16_bytes(compiled: list[Compiled]) -> None:
    found = [result for result in compiled if result.kernel == "fetch_blocks"]
    assert len(found) == len(WORKLOADS) * len(ARCHITECTURES)
    for result in found:
        moved = WORKLOADS[result.workload].chunk_bytes
        assert result.wide_loads * result.threads * 16 == moved
        assert result.wide_stores * result.threads * 16 == moved


def test_staged_pages_move_in_vectors_of_16_bytes(compiled: list[Compiled]) -> None:
    for result in compiled:
        chunk = WORKLOADS[result.workload].chunk_bytes
        loaded, stored = (16 * result.threads * wide for wide in (result.wide_loads, result.wide_stores))
        if result.kernel == "stage_pages":  # from the host or the cache, in one branch or two; into the buffer and it
            assert loaded in (chunk, 2 * chunk)
            assert stored == 2 * chunk
        elif result.kernel == "write_back":
            assert (loaded, stored) == (chunk, chunk)


def test_under_the_interpreter_the_report_says_what_to_do() -> None:
    ran = report([], TRITON_INTERPRET="1")
    assert ran.returncode != 0
    assert ran.stderr.endswith("TRITON_INTERPRET is set: unset it, nothing is compiled under it\n")
