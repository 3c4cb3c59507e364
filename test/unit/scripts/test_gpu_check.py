"""What `scripts/gpu_check.sh` runs on a GPU runs here in small on a CPU; and how it reports, skips and gives up."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from scripts.kernel_reports.cuda_report import traffic_of_qwen3_8b
from test.gpu.check import FAILED, PASSED, PYTEST, SKIPPED, Part, Report, results_path, run

REPOSITORY = Path(__file__).resolve().parents[3]


def check(command: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, cwd=REPOSITORY, env={**os.environ, **environment}, capture_output=True, text=True, timeout=120
    )


def test_a_rehearsal_passes_in_every_part_and_says_what_it_measured(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "test.gpu.check", "--device", "cpu"]
    done = check(command, OUT=str(tmp_path), OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "gpu_check.json").read_text())
    parts = {part["name"]: part for part in report["parts"]}
    assert [part["status"] for part in parts.values()] == [PASSED] * 6
    assert not any(part["tests"]["failed"] for part in parts.values() if "tests" in part)
    counts = parts["captured step"]["tests"]
    assert counts["passed"] >= 1
    assert counts["skipped"] == sum(counts["reasons"].values())
    assert f", tests: {counts['passed']} passed, {counts['skipped']} skipped (" in done.stdout
    assert {kernel["name"] for kernel in parts["bandwidth"]["results"]["kernels"]} >= {"fetch_blocks", "attend"}
    (context,) = parts["decode step"]["results"]["contexts"]
    assert context["lookahead"]["blocks_fetched_per_step"] > 0
    assert context["throughput_ratio"] > 0
    assert report["commit"]
    assert report["torch"]


def test_a_check_in_which_every_part_is_skipped_is_not_passed(tmp_path: Path) -> None:
    done = check([sys.executable, "-m", "test.gpu.check", "--device", "cpu", "--budget", "1"], OUT=f"{tmp_path}/new/")
    assert done.returncode == 2
    file = tmp_path / "new" / "gpu_check.json"
    assert done.stderr == f"[gpu] Nothing was checked: every part was skipped; reasons in {file}\n"
    assert "passed" not in done.stdout
    assert "skipped, 0 s are left" in done.stdout
    assert json.loads(file.read_text())["status"] == SKIPPED


@pytest.mark.parametrize("budget", ["0", "-5", "nan", "inf", "soon"])
def test_a_budget_that_is_no_positive_number_is_refused(budget: str) -> None:
    done = check([sys.executable, "-m", "test.gpu.check", "--device", "cpu", "--budget", budget])
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].endswith(f"{budget!r} is no positive number of seconds: give one, such as 360.")
    assert not done.stdout


@pytest.mark.parametrize(
    ("out", "file"), [("new/", "new/gpu_check.json"), ("new", "new"), ("there", "there/gpu_check.json")]
)
def test_results_go_to_a_file_or_into_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, out: str, file: str
) -> None:
    (tmp_path / "there").mkdir()
    monkeypatch.setenv("OUT", f"{tmp_path}/{out}")
    assert results_path() == tmp_path / file


def test_results_that_cannot_be_written_are_refused_in_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = check([sys.executable, "-m", "test.gpu.check", "--device", "cpu"], OUT=str(tmp_path / "file" / "x.json"))
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("[gpu] Nothing was checked: OUT cannot be written (")


@pytest.mark.parametrize("flag", ["-h", "--help"])
def test_the_script_explains_itself_without_a_gpu(flag: str) -> None:
    done = check(["bash", "scripts/gpu_check.sh", flag], PATH="/usr/bin:/bin")
    assert done.returncode == 0, done.stderr
    assert "scripts/gpu_check.sh [--budget SECONDS]" in done.stdout
    assert "Exit code 0: " in done.stdout
    assert "set -" not in done.stdout


@pytest.mark.parametrize(
    "arguments", [["--budget"], ["--budget", "0"], ["--budget", "-5"], ["--budget", "9", "more"], ["--fast"], [""]]
)
def test_the_script_refuses_wrong_arguments_before_it_looks_for_a_gpu(arguments: list[str]) -> None:
    done = check(["bash", "scripts/gpu_check.sh", *arguments], PATH="/usr/bin:/bin")
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert "--budget takes a positive number" in line or "there is no argument" in line


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
        python("killed", "import os; os.kill(os.getpid(), 9)"),
        python("crashed", "import os; os.kill(os.getpid(), 11)"),
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
        "good": PASSED, "bad": FAILED, "slow": FAILED, "killed": FAILED, "crashed": FAILED,
        "unlucky": SKIPPED, "unequipped": SKIPPED, "late": SKIPPED,
        "record": PASSED,
    }  # fmt: skip
    assert "wrong result" in found["bad"]["output"]
    assert found["slow"]["reason"] == "ran out of its time"
    assert found["bad"]["reason"] == "ended with code 1"
    assert found["killed"]["reason"] == "killed by signal 9, perhaps for want of memory"
    assert found["crashed"]["reason"] == "killed by signal 11"
    assert found["unlucky"]["reason"] == "the Python package no_such_module is missing"
    assert found["record"]["results"] == [1]
    assert written["status"] == FAILED


TESTS = """
import pytest
@pytest.mark.parametrize("number", range(4))
def test_number(number):
    if number < 2:
        pytest.skip("too few")
    if number == 2:
        pytest.skip("an even number")
"""


def test_a_part_says_how_many_of_its_tests_passed_and_why_others_were_skipped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "test_some.py"
    file.write_text(TESTS)
    report = Report(tmp_path / "report.json", {}, seconds=60)
    everything = Part("everything", (*PYTEST, str(file)), 30, 1)
    nothing = Part("nothing", (*PYTEST, f"{file}::test_number[2]"), 30, 1)
    run(report, [], [everything, nothing], tmp_path)
    first, second = report.parts
    assert first["tests"] == {
        "passed": 1, "skipped": 3, "reasons": {"too few": 2, "an even number": 1}, "failed": []
    }  # fmt: skip
    assert second["status"] == SKIPPED
    said = capsys.readouterr().out.splitlines()
    assert said[0].endswith("tests: 1 passed, 3 skipped (too few; an even number)")
    assert "nothing: skipped" in said[1]
    assert "tests: 0 passed, 1 skipped (an even number)" in said[1]
    assert report.conclude() == 0
    assert "[gpu] passed, 1 of 2 parts skipped; " in capsys.readouterr().out


@pytest.mark.parametrize(
    "module",
    [
        "scripts.kernel_reports.compile_report",
        "scripts.kernel_reports.cuda_report",
        "benchmark.device.step",
        "benchmark.device.kernels",
    ],
)
def test_a_report_that_cannot_be_written_is_refused_before_the_work(module: str, tmp_path: Path) -> None:
    file = tmp_path / "none" / "x.json"
    done = check([sys.executable, "-m", module, "--json", str(file)])
    assert done.returncode == 2
    said = f"argument --json: {file} cannot be written (No such file or directory): name another file."
    assert done.stderr.splitlines()[-1].endswith(said)
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("row", "kernels"),
    [
        ("| `fetch_blocks` | 59", ["fetch_blocks"]),
        ("| `fused_select`, int4 |", ["fused_select, int4", "fused_select, int4, read twice"]),
        ("| `fused_select`, int8 |", ["fused_select, int8"]),
        ("| `fused_select`, bf16 |", ["fused_select, bf16", "fused_select, bf16, read twice"]),
    ],
)
def test_the_ratios_in_the_documentation_are_those_that_are_counted(row: str, kernels: list[str]) -> None:
    lines = (REPOSITORY / "docs" / "kernels.md").read_text().splitlines()
    (found,) = [line for line in lines if line.startswith(row)]
    written, traffic = re.findall(r"\d\.\d+", found), traffic_of_qwen3_8b()
    assert [float(ratio) for ratio in written] == [
        round(traffic[kernel].ratio, len(ratio) - 2) for kernel, ratio in zip(kernels, written, strict=True)
    ]


def test_every_table_in_the_documentation_has_a_head() -> None:
    for name in ("kernels", "gpu"):
        for table in re.findall(r"(?:^\|.*\n)+", (REPOSITORY / "docs" / f"{name}.md").read_text(), re.MULTILINE):
            assert re.match(r"\|.*\n\|--", table), table


SGLANG_BLOCKED = """
import sys
sys.modules["sglang"] = None
import test.gpu.twins, benchmark.device.step, benchmark.device.kernels, benchmark.micro.zero_copy
import sglang_oasis.engine.attention.flashinfer, sglang_oasis.engine.attention.triton
import sglang_oasis.kernels.cuda.overrides, sglang_oasis.kernels.cuda.native
assert not [name for name in sys.modules if name.startswith("sglang.")]
"""


def test_nothing_of_this_needs_sglang() -> None:
    done = check([sys.executable, "-c", SGLANG_BLOCKED])
    assert done.returncode == 0, done.stderr
