"""A server ends when it is told to, with all its processes, whatever it is doing; and when it has lost its port."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest

from sglang_oasis.reference_model import truncated_model_path
from sglang_oasis.seams.termination import GRACE_SECONDS
from sglang_oasis.testing.ports import reserve_port
from sglang_oasis.testing.processes import Process, start, stop_group, wait_until_gone
from sglang_oasis.testing.server import PASSIVE_WAITING, Server, server_command, wait_until_ready
from test.e2e.in_flight import InFlight
from test.e2e.small_pool import ENVIRONMENT, FLAGS, LAYERS, text

pytestmark = pytest.mark.e2e

PROMISED = 15.0
"""Seconds in which a server ends."""
SLACK = 10.0
"""For a machine that does other things besides."""
START_TIMEOUT = 180.0
AT_ONCE = 2
SOON = 25
"""Tokens that are decoded in well under the time that requests are given."""

ENGINE = """
import json, sys
import sglang

if __name__ == "__main__":
    request = json.loads(sys.argv[1])
    engine = sglang.Engine(model_path=request["model"], enable_lookahead_kv=True, **request["flags"])
    engine.generate(input_ids=request["prompt"], sampling_params={"max_new_tokens": 1})
    print("GENERATES", flush=True)
    engine.generate(input_ids=request["prompt"], sampling_params={"max_new_tokens": 900, "ignore_eos": True})
"""


class End(NamedTuple):
    """How a program ended, with its whole process group.

    Attributes:
        exit_code: as `subprocess` gives it: negative for a signal.
        log: everything that was printed.
    """

    exit_code: int
    log: str


class Program:
    """A running program.

    Args:
        process: the first of its processes.
        log: what they print.
    """

    def __init__(self, process: Process, log: Path) -> None:
        self.process = process
        self._log = log

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def wait_for(self, happened: Callable[[], Any]) -> None:
        """Return as soon as something has happened."""
        deadline = time.monotonic() + START_TIMEOUT
        while not happened():
            assert self.process.poll() is None, self.log
            assert time.monotonic() < deadline, self.log
            time.sleep(0.02)

    def spawned(self) -> list[psutil.Process]:
        """Its schedulers and detokenizers; those that are not there yet by the words that spawn them."""
        found = []
        for child in psutil.Process(self.process.pid).children():
            with contextlib.suppress(psutil.NoSuchProcess):  # such as lscpu, which has ended meanwhile
                words = " ".join(child.cmdline())
                if "sglang::" in words or "--multiprocessing-fork" in words:
                    found.append(child)
        return found

    def stop_scheduler(self) -> None:
        """From now on its pass does not end, as if it took hours."""
        (scheduler,) = [child for child in self.spawned() if "scheduler" in child.cmdline()[0]]
        scheduler.suspend()

    def end(self, sign: int) -> End:
        """Send the first process a signal, and wait until all have ended."""
        os.kill(self.process.pid, sign)
        return self.ended(PROMISED + SLACK)

    def ended(self, within: float) -> End:
        """Wait until the first process has ended, for so many seconds, and see that the others do.

        Raises:
            subprocess.TimeoutExpired: it goes on.
            AssertionError: others go on.
        """
        exit_code = self.process.wait(within)
        wait_until_gone(self.process.pid)
        return End(exit_code, self.log)


@contextlib.contextmanager
def program(log: Path, argv: list[str], *, ordinary: bool = False) -> Iterator[Program]:
    environment = {**PASSIVE_WAITING, **os.environ, **ENVIRONMENT}
    with log.open("w") as output:
        process = start(argv, environment=environment, output=output, ordinary=ordinary)
    try:
        yield Program(process, log)
    finally:
        stop_group(process)


@contextlib.contextmanager
def launcher(log: Path, *, ordinary: bool = False, port: int | None = None) -> Iterator[Program]:
    argv = server_command(*FLAGS, model=truncated_model_path(LAYERS), port=port)
    with program(log, argv, ordinary=ordinary) as running:
        yield running


@contextlib.contextmanager
def server(log: Path) -> Iterator[tuple[Program, Server]]:
    """A launcher whose server is ready."""
    port = reserve_port()
    with launcher(log, port=port) as running:
        ready = Server(f"http://127.0.0.1:{port}", running.process.pid, log)
        wait_until_ready(ready, running.process)
        yield running, ready


# --- what happens to a server; each returns how it ended ---


def killed_while_its_processes_import(log: Path) -> End:
    with launcher(log, ordinary=True) as running:
        running.wait_for(lambda: len(running.spawned()) == 2)
        return running.end(signal.SIGKILL)


def told_while_the_model_loads(log: Path, sign: int) -> End:
    with launcher(log) as running:
        running.wait_for(lambda: "Load weight begin" in running.log)
        return running.end(sign)


def told_in_a_pass_that_takes_hours(log: Path, sign: int) -> End:
    with server(log) as (running, ready):
        stream = InFlight(ready, text(0, 300), 600, stream=True, sampling={"ignore_eos": True})
        stream.wait_for_tokens(2)
        running.stop_scheduler()
        return running.end(sign)


def told_while_a_request_decodes(log: Path, sign: int) -> End:
    with server(log) as (running, ready):
        stream = InFlight(ready, text(0, 300), SOON, stream=True, sampling={"ignore_eos": True})
        stream.wait_for_tokens(2)
        with ThreadPoolExecutor(1) as reader:
            answered = reader.submit(stream.wait_for_tokens, SOON)
            end = running.end(sign)
            answered.result(SLACK)
        return end


def port_taken_while_it_starts(log: Path) -> End:
    port = reserve_port()
    with launcher(log, port=port) as running:
        running.wait_for(lambda: len(running.spawned()) == 2)  # the port has been checked
        with socket.create_server(("127.0.0.1", port)):
            return running.ended(START_TIMEOUT)  # it notices when it has loaded the model


def engine_told_while_it_generates(log: Path, sign: int) -> End:
    flags = {"lookahead_kv_host_gb": 0.2, "lookahead_kv_device_gb": 0.2, "context_length": 1024}
    request = {"model": str(truncated_model_path(LAYERS)), "flags": flags, "prompt": text(0, 100)}
    script = log.with_suffix(".py")
    script.write_text(ENGINE)
    with program(log, [str(script), json.dumps(request)]) as running:
        running.wait_for(lambda: "GENERATES" in running.log)
        running.stop_scheduler()
        return running.end(sign)


UNANSWERED = f"The server ends {GRACE_SECONDS:.0f} s after {{}}; unanswered requests: 1."
# Name -> (what happens, exit codes, what is printed).
CASES: dict[str, tuple[Callable[[Path], End], tuple[int, ...], str]] = {
    "killed while its processes import": (killed_while_its_processes_import, (-signal.SIGKILL,), ""),
    "SIGTERM while the model loads": (lambda log: told_while_the_model_loads(log, signal.SIGTERM), (-15,), ""),
    "SIGINT while the model loads": (lambda log: told_while_the_model_loads(log, signal.SIGINT), (-2, 1), ""),
    "SIGTERM in a pass that takes hours": (
        lambda log: told_in_a_pass_that_takes_hours(log, signal.SIGTERM),
        (128 + signal.SIGTERM,),
        UNANSWERED.format("SIGTERM"),
    ),
    "SIGINT in a pass that takes hours": (
        lambda log: told_in_a_pass_that_takes_hours(log, signal.SIGINT),
        (128 + signal.SIGINT,),
        UNANSWERED.format("SIGINT"),
    ),
    "killed in a pass that takes hours": (
        lambda log: told_in_a_pass_that_takes_hours(log, signal.SIGKILL),
        (-signal.SIGKILL,),
        "",
    ),
    "SIGTERM while a request decodes": (lambda log: told_while_a_request_decodes(log, signal.SIGTERM), (0,), ""),
    "port taken while it starts": (port_taken_while_it_starts, (1,), "cannot be used (Address already in use): stop"),
    "SIGTERM to an engine": (lambda log: engine_told_while_it_generates(log, signal.SIGTERM), (-15,), ""),
    "SIGINT to an engine": (lambda log: engine_told_while_it_generates(log, signal.SIGINT), (-2, 1), ""),
}


@pytest.fixture(scope="module")
def ends(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Callable[[], End]]]:
    logs = tmp_path_factory.mktemp("logs")
    with ThreadPoolExecutor(AT_ONCE) as pool:
        running = {
            name: pool.submit(case[0], logs / f"{number}.log") for number, (name, case) in enumerate(CASES.items())
        }
        yield {name: run.result for name, run in running.items()}


@pytest.mark.parametrize("name", CASES)
def test_every_process_ends_in_time(ends: dict[str, Callable[[], End]], name: str) -> None:
    _, exit_codes, printed = CASES[name]
    end = ends[name]()
    assert end.exit_code in exit_codes, end.log
    assert printed in end.log


def test_a_lost_port_is_told_in_one_sentence(ends: dict[str, Callable[[], End]]) -> None:
    last = [line for line in ends["port taken while it starts"]().log.splitlines() if line.strip()][-1]
    assert last.startswith("error: port ")
