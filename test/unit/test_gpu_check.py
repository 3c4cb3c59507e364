"""What `scripts/gpu_check.sh` runs on a GPU runs here in small on a CPU; and how it reports, skips and gives up."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from test.gpu.check import FAILED, PASSED, SKIPPED, Part, Report, run

REPOSITORY = Path(__file__).resolve().parents[2]


def check(command: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, cwd=REPOSITORY, env={**os.environ, **environment}, capture_output=True, text=True, timeout=120
    )


def test_a_rehearsal_passes_in_every_part_and_says_what_it_measured(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "test.gpu.check", "--device", "cpu", "--tiny"]
    done = check(command, OUT=str(tmp_path), OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "gpu_check.json").read_text())
    parts = {part["name"]: part for part in report["parts"]}
    assert [part["status"] for part in parts.values()] == [PASSED] * 6
    assert not any(part["tests"]["failed"] for part in parts.values() if "tests" in part)
    assert {kernel["name"] for kernel in parts["bandwidth"]["results"]["kernels"]} >= {"fetch_blocks", "attend"}
    (context,) = parts["decode step"]["results"]["contexts"]
    assert context["lookahead"]["blocks_fetched_per_step"] > 0
    assert context["throughput_ratio"] > 0
    assert report["commit"]
    assert report["torch"]


def test_without_a_gpu_one_sentence_says_so(tmp_path: Path) -> None:
    done = check(["bash", "scripts/gpu_check.sh"], PATH="/usr/bin:/bin", OUT=str(tmp_path / "none.json"))
    if "nvidia-smi" not in done.stderr:
        pytest.skip("this machine has a GPU")
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("[gpu] Nothing was checked: ")
    assert not done.stdout


def test_a_python_that_cannot_use_the_gpu_is_refused_in_a_sentence(tmp_path: Path) -> None:
    if torch.version.cuda is not None:
        pytest.skip("this torch can use a GPU")
    driver = tmp_path / "nvidia-smi"
    driver.write_text("#!/bin/sh\necho 'GPU 0: none'\n")
    driver.chmod(0o755)
    path = os.pathsep.join([str(tmp_path), "/usr/bin", "/bin"])
    done = check(["bash", "scripts/gpu_check.sh"], PATH=path, OASIS_PYTHON=sys.executable)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert "set OASIS_PYTHON" in line


def python(name: str, source: str, **options: Any) -> Part:
    return Part(name, ("-c", source), **{"seconds": 20, "least": 1, **options})


def test_parts_that_fail_hang_or_lack_something_are_told_apart(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    report = Report(path, {"device": "none"}, seconds=60)
    together = [
        python("good", "print('fine')"),
        python("bad", "raise SystemExit('wrong result')"),
        python("slow", "import time; time.sleep(60)", seconds=0.5),
        python("unlucky", "", modules=("no_such_module",)),
        python("unequipped", "", tool=("no-such-tool",)),
        python("late", "", least=100),
    ]
    record = python("record", "import sys; open(sys.argv[1], 'w').write('[1]')")
    alone = [record._replace(command=(*record.command, "{json}"))]
    run(report, together, alone, tmp_path)
    written = json.loads(path.read_text())
    found = {part["name"]: part for part in written["parts"]}
    assert {name: part["status"] for name, part in found.items()} == {
        "good": PASSED, "bad": FAILED, "slow": FAILED, "unlucky": SKIPPED, "unequipped": SKIPPED, "late": SKIPPED,
        "record": PASSED,
    }  # fmt: skip
    assert "wrong result" in found["bad"]["output"]
    assert found["slow"]["reason"] == "ran out of its time"
    assert found["unlucky"]["reason"] == "the Python package no_such_module is missing"
    assert found["record"]["results"] == [1]
    assert written["status"] == FAILED


SGLANG_BLOCKED = """
import sys
sys.modules["sglang"] = None
import test.gpu.twins, benchmark.device_step, benchmark.device_kernels, benchmark.zero_copy
import sglang_oasis.attention.flashinfer_attention, sglang_oasis.attention.triton_attention
import sglang_oasis.ops.cuda, sglang_oasis.ops.cuda_kernels
assert not [name for name in sys.modules if name.startswith("sglang.")]
"""


def test_nothing_of_this_needs_sglang() -> None:
    done = check([sys.executable, "-c", SGLANG_BLOCKED])
    assert done.returncode == 0, done.stderr
