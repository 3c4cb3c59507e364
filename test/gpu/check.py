"""Runs all that wants a GPU within a few minutes, and writes one JSON file: `scripts/gpu_check.sh` calls it.

    python -m test.gpu.check [--device cpu]

Parts are processes of their own: one that crashes or hangs takes nothing else along. Correctness comes first, all
parts of it at once; what is timed has the GPU to itself. A part for which the time does not last is skipped.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import importlib.util
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

REPOSITORY = Path(__file__).resolve().parents[2]
PASSED, FAILED, SKIPPED = "passed", "failed", "skipped"
NOTHING_CHECKED = 2
BUDGET_SECONDS = 360
RESERVE_SECONDS = 5
POLL_SECONDS = 0.1
SHOWN = 3000
"""Characters of the output of a part that failed which go into the JSON."""
PACKAGES = ("torch", "triton", "flashinfer-python", "apache-tvm-ffi", "numpy", "pytest", "hypothesis")
PYTEST = ("-m", "pytest", "-c", "test/gpu/pytest.ini", "-q", "-p", "no:cacheprovider", "--tb=short")
TESTED_BY = ("pytest", "hypothesis")


class Part(NamedTuple):
    """A process to run.

    Attributes:
        name: in the report.
        command: arguments of Python; `{left}` becomes the seconds that it may take, `{json}` a file for its record.
        seconds: it may take.
        least: with less left it is not started.
        modules: that it imports, besides torch.
        tool: program that runs it, if it is there.
        environment: variables that are set for it.
    """

    name: str
    command: tuple[str, ...]
    seconds: float
    least: float
    modules: tuple[str, ...] = ()
    tool: tuple[str, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()

    @property
    def tests(self) -> bool:
        return "pytest" in self.command


def parts(device: str, tiny: bool) -> tuple[list[Part], list[Part]]:
    """Those that run at once, and those that run one after the other."""
    mode = ("--device", device, *(("--tiny",) if tiny else ()))

    def tests(name: str, *files: str, seconds: float = 150, modules: tuple[str, ...] = ()) -> Part:
        paths = tuple(f"test/gpu/{file}.py" for file in files)
        command = (*PYTEST, *paths, *mode)
        return Part(name, command, seconds, 30, (*TESTED_BY, *modules))

    def sanitizer(tool: str, cases: str) -> Part:
        command = (*PYTEST, "test/gpu/test_cuda_kernels.py", "--tiny", "-k", cases)
        # An allocation of its own per tensor, or what lies behind one would belong to the next.
        return Part(
            f"compute-sanitizer {tool}", command, 60, 25, (*TESTED_BY, "tvm_ffi"),
            ("compute-sanitizer", "--tool", tool, "--error-exitcode", "9", "--print-limit", "5"),
            (("PYTORCH_NO_CUDA_MEMORY_CACHING", "1"),),
        )  # fmt: skip

    together = [
        tests("Triton kernels", "test_triton_ops", "test_staging", modules=("triton",)),
        tests("CUDA C++ kernels", "test_cuda_kernels", modules=("tvm_ffi",)),
        tests("captured step", "test_schedule", modules=("triton",)),
        tests("FlashInfer", "test_flashinfer", modules=("flashinfer",) if device == "cuda" else ()),
    ]
    bandwidth = ("-m", "benchmark.device.kernels", *mode, "--json", "{json}")
    step = ("-m", "benchmark.device.step", *mode, "--seconds", "{left}", "--json", "{json}")
    alone = [
        Part("bandwidth", bandwidth, seconds=60, least=20, modules=("triton",)),
        Part("decode step", step, seconds=150, least=50, modules=("triton", "psutil")),
    ]
    if device == "cuda":
        cases = "distinct or (admitted_blocks and 0)"
        alone += [sanitizer("memcheck", cases), sanitizer("racecheck", cases)]
    return together, alone


class Running:
    """A part that was started.

    Args:
        part: which.
        seconds: it may take.
        folder: for its files.
    """

    def __init__(self, part: Part, seconds: float, folder: Path) -> None:
        self.part = part
        stem = part.name.replace(" ", "_").replace("+", "p").lower()
        self._log, self._json, self._xml = (folder / f"{stem}.{kind}" for kind in ("log", "json", "xml"))
        for file in (self._json, self._xml):
            file.unlink(missing_ok=True)
        known = {"{left}": f"{seconds - 10:.0f}", "{json}": str(self._json)}
        command = [known.get(word, word) for word in part.command]
        if part.tests:
            command.append(f"--junitxml={self._xml}")
        self.began, self._deadline = time.monotonic(), time.monotonic() + seconds
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [*part.tool, sys.executable, *command], cwd=REPOSITORY, stdout=log, stderr=subprocess.STDOUT,
                env={**os.environ, **dict(part.environment)}, start_new_session=True,
            )  # fmt: skip

    @property
    def ended(self) -> bool:
        """By itself, or because its time is over."""
        return self._process.poll() is not None or time.monotonic() > self._deadline

    def finish(self) -> dict[str, Any]:
        """Wait for it, end it when its time is over, and say how it went."""
        late = False
        try:
            self._process.wait(max(0.1, self._deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            late = True
            self.stop()
        record: dict[str, Any] = {"name": self.part.name, "status": PASSED}
        record["seconds"] = round(time.monotonic() - self.began, 1)
        output = self._log.read_text(errors="replace")
        if self.part.tool and "device not supported" in output.lower():
            return {**record, "status": SKIPPED, "reason": f"{self.part.tool[0]} does not support this device"}
        if self.part.tool and late:
            return {**record, "status": SKIPPED, "reason": f"{self.part.tool[0]} found nothing in its time"}
        if late or self._process.returncode != 0:
            record["status"] = FAILED
            record["reason"] = "ran out of its time" if late else ending(self._process.returncode)
            record["output"] = output[-SHOWN:]
        if self._xml.exists():
            record["tests"] = counts_of(self._xml)
            if record["status"] == PASSED and not record["tests"]["passed"]:
                record["status"], record["reason"] = SKIPPED, "it has no tests that run here"
        with contextlib.suppress(OSError, ValueError):  # a part that was ended may have left none, or half of one
            record["results"] = json.loads(self._json.read_text())
        return record

    def stop(self) -> None:
        """End it with all that it has started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def counts_of(xml: Path) -> dict[str, Any]:
    """How many tests passed and were skipped, why (reason to number), and which failed."""
    cases = list(ET.parse(xml).getroot().iter("testcase"))
    failed = [case.get("name") for case in cases if case.find("failure") is not None or case.find("error") is not None]
    reasons = Counter(str(skip.get("message")) for case in cases for skip in case.findall("skipped"))
    skipped = reasons.total()
    passed = len(cases) - len(failed) - skipped
    return {"passed": passed, "skipped": skipped, "reasons": dict(reasons), "failed": failed}


def in_words(tests: dict[str, Any]) -> str:
    """Counts as one phrase."""
    reasons = "; ".join(tests["reasons"])
    skipped = f", {tests['skipped']} skipped ({reasons})" if reasons else ""
    failed = f", {len(tests['failed'])} failed" if tests["failed"] else ""
    return f"tests: {tests['passed']} passed{failed}{skipped}"


def ending(code: int) -> str:
    """How a process ended that did not succeed."""
    if code >= 0:
        return f"ended with code {code}"
    return f"killed by signal {-code}{', perhaps for want of memory' if code == -signal.SIGKILL else ''}"


def missing(part: Part, left: float) -> str | None:
    """Why a part cannot run, None if it can."""
    for module in part.modules:
        if importlib.util.find_spec(module) is None:
            return f"the Python package {module} is missing"
    if part.tool and shutil.which(part.tool[0]) is None:
        return f"{part.tool[0]} is not on PATH"
    if left < part.least:
        return f"{left:.0f} s are left, and it takes {part.least:.0f} s at least"
    return None


class Report:
    """Prints parts as they end, and keeps the JSON file up to date.

    Args:
        path: of the file.
        facts: about the machine.
        seconds: of the whole check.
    """

    def __init__(self, path: Path, facts: dict[str, Any], seconds: float) -> None:
        self._path, self._facts, self._seconds = path, facts, seconds
        self._began = time.monotonic()
        self.parts: list[dict[str, Any]] = []

    @property
    def left(self) -> float:
        """Seconds for parts that have not begun."""
        return max(0.0, self._seconds - RESERVE_SECONDS - (time.monotonic() - self._began))

    def add(self, record: dict[str, Any]) -> None:
        self.parts.append(record)
        said = [f"{record['name']}: {record['status']}"]
        said += [f"{record['seconds']} s"] if "seconds" in record else []
        said += [in_words(record["tests"])] if "tests" in record else []
        said += [record["reason"]] if "reason" in record else []
        print(f"[gpu] {', '.join(said)}", flush=True)
        if record["status"] == FAILED:
            print(record.get("output", ""), flush=True)
        whole = {
            **self._facts, "status": self.status, "seconds": round(time.monotonic() - self._began, 1),
            "parts": self.parts,
        }  # fmt: skip
        self._path.write_text(json.dumps(whole, indent=1) + "\n")

    def skip(self, part: Part, reason: str) -> None:
        self.add({"name": part.name, "status": SKIPPED, "reason": reason})

    @property
    def status(self) -> str:
        """Skipped: nothing was checked."""
        found = {record["status"] for record in self.parts}
        return next((status for status in (FAILED, PASSED) if status in found), SKIPPED)

    def conclude(self) -> int:
        """Say how all of it went, and return the exit code."""
        if self.status == SKIPPED:
            print(f"[gpu] Nothing was checked: every part was skipped; reasons in {self._path}", file=sys.stderr)
            return NOTHING_CHECKED
        skipped = sum(record["status"] == SKIPPED for record in self.parts)
        left_out = f", {skipped} of {len(self.parts)} parts skipped" if skipped else ""
        print(f"[gpu] {self.status}{left_out}; results in {self._path}")
        return 1 if self.status == FAILED else 0


def run(report: Report, together: Sequence[Part], alone: Sequence[Part], folder: Path) -> None:
    running = []
    for part in together:
        if (reason := missing(part, report.left)) is None:
            running.append(Running(part, min(part.seconds, report.left), folder))
        else:
            report.skip(part, reason)
    try:
        pending = list(running)
        while pending:
            for process in [process for process in pending if process.ended]:
                pending.remove(process)
                report.add(process.finish())
            time.sleep(POLL_SECONDS)
        for part in alone:
            if (reason := missing(part, report.left)) is None:
                running.append(Running(part, min(part.seconds, report.left), folder))
                report.add(running[-1].finish())
            else:
                report.skip(part, reason)
    finally:
        for process in running:
            process.stop()


def facts(device: str) -> dict[str, Any]:
    """Device, driver, versions and commit."""
    found: dict[str, Any] = {"device": "cpu, a rehearsal" if device == "cpu" else None, "driver": None}
    if device == "cuda":
        asked = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader", "--id=0"]
        name, driver, memory = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.split(",")
        found = {"device": name.strip(), "driver": driver.strip(), "memory": memory.strip()}
    for package in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    git = ["git", "-C", str(REPOSITORY), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    with contextlib.suppress(OSError):
        found["commit"] = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip() or None
    return {**found, "python": sys.version.split()[0]}


def why_no_gpu() -> str | None:
    """Why nothing can run on a GPU here, None if something can."""
    if importlib.util.find_spec("torch") is None:
        return f"{sys.executable} has no torch: set OASIS_PYTHON to a Python that has a CUDA build of it."
    import torch

    if torch.version.cuda is None:
        return f"torch {torch.__version__} of {sys.executable} is a build without CUDA: set OASIS_PYTHON to another."
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} of {sys.executable} finds no GPU: check the driver with nvidia-smi."
    return None


def results_path() -> Path:
    """`$OUT`, a file or a folder (one that is there, or a name that ends in a slash), or build/gpu_check.json."""
    named = os.environ.get("OUT") or str(REPOSITORY / "build" / "gpu_check.json")
    path = Path(named)
    if named.endswith("/") or path.is_dir():
        path /= "gpu_check.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    return path


def positive_seconds(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0 < (seconds := float(text)) < math.inf:
            return seconds
    raise argparse.ArgumentTypeError(f"{text!r} is no positive number of seconds: give one, such as {BUDGET_SECONDS}.")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="as little as a CPU rehearses; implied by --device cpu")
    parser.add_argument(
        "--budget", type=positive_seconds, default=BUDGET_SECONDS, metavar="SECONDS", help="for all of it"
    )
    options = parser.parse_args()
    if options.device == "cuda" and (reason := why_no_gpu()):
        print(f"[gpu] Nothing was checked: {reason}", file=sys.stderr)
        return NOTHING_CHECKED
    try:
        path = results_path()
    except OSError as error:
        print(f"[gpu] Nothing was checked: OUT cannot be written ({error}): name another place.", file=sys.stderr)
        return NOTHING_CHECKED
    os.environ["PYTHONPATH"] = os.pathsep.join(
        [str(REPOSITORY / "python"), *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    together, alone = parts(options.device, options.tiny or options.device == "cpu")
    folder = REPOSITORY / "build" / "gpu_check"
    folder.mkdir(parents=True, exist_ok=True)
    for part in [*together, *alone]:
        print(f"[gpu] {part.name}: up to {part.seconds:.0f} s{', with others' if part in together else ''}")
    report = Report(path, facts(options.device), options.budget)
    run(report, together, alone, folder)
    return report.conclude()


if __name__ == "__main__":
    raise SystemExit(main())
