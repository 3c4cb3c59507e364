"""scripts/setup_env.sh with a stand-in for Python and pip: what it installs when, what it says, how it ends."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[3]
TIMEOUT_S = 60
TOOLS = (
    *("bash", "basename", "cat", "cp", "cut", "dirname", "env", "flock", "grep", "ls", "mkdir", "mv", "realpath", "rm"),
    *("sha256sum", "sleep", "tail", "timeout", "touch", "tr", "printf", "sed"),
)
"""All programs that there are: neither lscpu, nproc, df nor awk, and no compiler."""

PYTHON = f"""#!/bin/bash
# Stands in for the Python that makes the environment, and for the one in it.
echo "$*" >>"$CALLS"
case "$*" in
"-m venv "*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
"-m pip --version") ;;
"-m pip install"*"-e .") echo "$PWD/python/sglang_oasis/__init__.py" >"$OASIS_VENV/linked" ;;
"-m pip install"*torch.txt)
    echo "Collecting torch"
    [[ -z ${{FAIL:-}} ]] || {{ echo "ERROR: No matching distribution found for torch" && exit 1; }}
    [[ -z ${{HANG:-}} ]] || exec sleep 600 ;;
"-m pip install"*) echo "Collecting everything" ;;
"-I -c"*) cat "$OASIS_VENV/linked" ;;
"-m sglang_oasis.kernels.cpu.native")
    echo "CPU kernels: there"
    [[ -z ${{NO_COMPILER:-}} ]] || {{ echo "There is no compiler." && exit 1; }} ;;
"-c "*) exec {sys.executable} "$@" ;;
*) echo "unexpected: $*" >&2 && exit 99 ;;
esac
"""


class Machine:
    """A checkout, an environment and the tools, in folders with spaces in their names."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "a user's"
        self.calls, self.venv = self.folder / "calls", self.folder / "my venv"
        tools = self.folder / "tools"
        tools.mkdir(parents=True)
        for name in TOOLS:
            if found := shutil.which(name):
                (tools / name).symlink_to(found)
        python = self.folder / "python"
        python.write_text(PYTHON)
        python.chmod(0o755)
        self.environment = {
            "PATH": str(tools),
            "CALLS": str(self.calls),
            "OASIS_VENV": str(self.venv),
            "OASIS_PYTHON": str(python),
            "OASIS_PROFILE": "cpu",
        }
        self.checkout = self.make_checkout("check out")

    def make_checkout(self, name: str) -> Path:
        checkout = self.folder / name
        for part in ("scripts", "requirements"):
            shutil.copytree(REPO / part, checkout / part)
        shutil.copy(REPO / "pyproject.toml", checkout)
        (checkout / "python" / "sglang_oasis").mkdir(parents=True)
        (checkout / "python" / "sglang_oasis" / "__init__.py").touch()
        return checkout

    def start(self, checkout: Path | None = None, **environment: str) -> subprocess.Popen[str]:
        self.calls.write_text("")
        return subprocess.Popen(
            ["bash", str((checkout or self.checkout) / "scripts" / "setup_env.sh")],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**self.environment, **environment},  # no HOME
            start_new_session=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # what runs in the background ignores it
        )

    def run(self, checkout: Path | None = None, **environment: str) -> tuple[int, list[str]]:
        """Its exit code and its lines."""
        process = self.start(checkout, **environment)
        said = process.communicate(timeout=TIMEOUT_S)[0]
        return process.returncode, said.splitlines()

    def installed(self) -> list[str]:
        """What pip was told to install in the last run."""
        return [line for line in self.calls.read_text().splitlines() if line.startswith("-m pip install")]


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_a_first_run_says_one_line_per_stage_and_keeps_what_pip_says(machine: Machine) -> None:
    code, lines = machine.run()
    assert code == 0, lines
    assert all(line.startswith("[setup] ") for line in lines)
    stages = [line.split(": ")[0].removeprefix("[setup] ") for line in lines if line.endswith(" s")]
    assert stages == [
        "Creating it",
        "Installing SGLang's lean CPU requirements, about 100 packages",
        "Installing torch",
        *(["Installing an import stub in place of torchvision"] if len(machine.installed()) == 4 else []),
        f"Linking {machine.checkout} into it",
        "Building the CPU kernels, unless they are cached",
    ]
    log = (machine.venv / "setup.log").read_text()
    assert "Collecting everything" in log
    assert "Collecting torch" in log


def test_a_second_run_installs_and_links_nothing(machine: Machine) -> None:
    machine.run()
    code, lines = machine.run()
    assert code == 0, lines
    assert machine.installed() == []


def test_an_environment_of_another_checkout_is_linked_again_and_nothing_else(machine: Machine) -> None:
    machine.run()
    other = machine.make_checkout("other")
    code, lines = machine.run(other)
    assert code == 0, lines
    assert machine.installed() == ["-m pip install --no-deps --no-build-isolation -e ."]
    assert (machine.venv / "linked").read_text().strip() == f"{other}/python/sglang_oasis/__init__.py"


def test_changed_requirements_are_installed(machine: Machine) -> None:
    machine.run()
    with (machine.checkout / "requirements" / "torch.txt").open("a") as file:
        file.write("# another\n")
    assert machine.run()[0] == 0
    assert "-m pip install --no-warn-conflicts -r requirements/torch.txt" in machine.installed()


def test_a_failure_shows_the_end_of_what_pip_said_and_the_next_run_begins_again(machine: Machine) -> None:
    code, lines = machine.run(FAIL="1")
    assert code == 1
    assert "ERROR: No matching distribution found for torch" in lines
    assert lines[-1] == (
        f"[setup] Installing torch: failed, see the end of its output above and all of it in {machine.venv}/setup.log"
    )
    code, lines = machine.run()
    assert code == 0
    assert "the last attempt was interrupted" in lines[0]


def test_without_a_compiler_the_environment_is_ready_and_says_what_is_missing(machine: Machine) -> None:
    code, lines = machine.run(NO_COMPILER="1")
    assert code == 0
    assert "[setup] There is no compiler. Everything runs without them." in lines


@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGTERM])
def test_an_interruption_ends_pip_too(machine: Machine, sign: signal.Signals) -> None:
    process = machine.start(HANG="1")
    deadline = time.monotonic() + TIMEOUT_S
    while "torch.txt" not in machine.calls.read_text():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    os.killpg(process.pid, sign)
    process.communicate(timeout=TIMEOUT_S)  # returns when nobody holds the pipe: neither the script nor pip
    assert process.returncode == 128 + sign
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)


def test_a_place_that_cannot_be_written_ends_in_one_sentence(machine: Machine) -> None:
    (machine.folder / "file").touch()
    code, lines = machine.run(OASIS_VENV=str(machine.folder / "file" / "venv"))
    assert code == 1
    assert lines == [
        f"[setup] Nothing can be written beside {machine.folder}/file/venv; set OASIS_VENV to another folder."
    ]
