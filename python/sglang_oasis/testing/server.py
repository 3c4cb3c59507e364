"""Starts real servers for the end-to-end tests and talks to them."""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import requests

from sglang_oasis.reference_model import reference_model_path
from sglang_oasis.testing.ports import reserve_port
from sglang_oasis.testing.processes import Process, start, stop_group

START_TIMEOUT = 240.0
ANSWER_TIMEOUT = 240.0
"""Timeout in seconds for requests that run the model, on a slow machine with other load."""
REQUEST_TIMEOUT = 60.0
"""Timeout in seconds for other requests."""

PASSIVE_WAITING = {"OMP_WAIT_POLICY": "PASSIVE"}
"""Also for stock servers, because spinning OpenMP threads block each other if another process needs the cores."""

LIMITS_OF_THE_POOL = ("--max-total-tokens", "--lookahead-kv-host-gb")


class Server:
    """A running SGLang server.

    Attributes:
        url: base URL.
        pid: process id of the launcher, the leader of its process group.
        log: file with the output of the server.
    """

    def __init__(self, url: str, pid: int, log: Path) -> None:
        self.url = url
        self.pid = pid
        self.log = log

    def generate(
        self,
        prompt: str | list[int],
        *,
        max_new_tokens: int,
        rid: str | None = None,
        sampling: dict[str, Any] | None = None,
        **request: Any,
    ) -> dict[str, Any]:
        """Send POST /generate, greedy unless `sampling` changes this; other keywords are fields of the request."""
        body: dict[str, Any] = {
            "text" if isinstance(prompt, str) else "input_ids": prompt,
            "sampling_params": {"max_new_tokens": max_new_tokens, "temperature": 0, **(sampling or {})},
            **request,
        }
        if rid is not None:
            body["rid"] = rid
        response = requests.post(f"{self.url}/generate", json=body, timeout=ANSWER_TIMEOUT)
        if not response.ok:
            raise RuntimeError(f"/generate answered {response.status_code}: {response.text}")
        return response.json()

    def stats(self) -> dict[str, Any]:
        """Return the statistics of the only data-parallel rank."""
        (rank,) = self.get("/lookahead_kv/stats").json()["ranks"]
        return rank

    def get(self, path: str) -> requests.Response:
        return requests.get(f"{self.url}{path}", timeout=REQUEST_TIMEOUT)

    def post(self, path: str, **body: Any) -> requests.Response:
        return requests.post(f"{self.url}{path}", json=body, timeout=REQUEST_TIMEOUT)

    def tracebacks(self) -> list[str]:
        """Return every traceback in the log, from the line before it to the exception's message."""
        log = self.log.read_text(errors="replace")
        return re.findall(r".*\nTraceback \(most recent call last\):\n(?:\s.*\n)*.*", log)

    def wait_until_idle(self, timeout: float = 60.0) -> None:
        """Wait until no request runs or waits."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            (load,) = self.get("/v1/loads?include=core").json()["loads"]
            if load["num_running_reqs"] == load["num_waiting_reqs"] == 0:
                return
            time.sleep(0.2)
        raise TimeoutError(f"requests still run or wait after {timeout} s")


def server_command(*flags: str, model: Path | None = None, port: int | None = None) -> list[str]:
    """Return the interpreter's arguments for a server with the reference model."""
    data_parallel = {"--dp-size", "--dp", "--data-parallel-size"}.intersection(flags)
    # Every data-parallel rank has a port of its own.
    ranks = () if data_parallel else ("--nccl-port", str(reserve_port()))
    return [
        *("-m", "sglang.launch_server"),
        *("--model-path", str(model or reference_model_path())),
        *("--host", "127.0.0.1", "--port", str(port or reserve_port())),
        *ranks,
        *flags,
    ]


@contextlib.contextmanager
def launch_server(
    *flags: str, env: dict[str, str] | None = None, model: Path | None = None, ordinary: bool = False
) -> Iterator[Server]:
    """Run a server with these flags; none of its processes is left afterwards.

    Args:
        flags: flags of the server.
        env: environment variables in addition to those of this module.
        model: folder of the model; None for the reference model.
        ordinary: start the server as a user does, instead of forking it from a template.

    Raises:
        ValueError: nothing limits the server's KV pool, so it would take the memory that other servers count on.
    """
    if not set(LIMITS_OF_THE_POOL) & set(flags):
        raise ValueError(f"a server needs one of {', '.join(LIMITS_OF_THE_POOL)}, got {' '.join(flags)}.")
    port = reserve_port()
    argv = server_command(*flags, model=model, port=port)
    environment = {**PASSIVE_WAITING, **os.environ, **(env or {})}
    with tempfile.TemporaryDirectory(prefix="oasis-server-") as folder:
        log = Path(folder) / "server.log"
        with log.open("w") as output:
            process = start(argv, environment=environment, output=output, ordinary=ordinary)
        server = Server(f"http://127.0.0.1:{port}", process.pid, log)
        try:
            wait_until_ready(server, process)
            yield server
        except BaseException:
            print(f"--- last lines of the server ({' '.join(flags)}) ---\n{tail(log)}")
            raise
        finally:
            if process.poll() is not None:
                print(f"--- the server died ({' '.join(flags)}) ---\n{tail(log, 80)}")
            stop_group(process)


def tail(log: Path, lines: int = 30) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])


def wait_until_ready(server: Server, process: Process) -> None:
    """Wait until the server generates.

    Raises:
        RuntimeError: the server has ended.
        TimeoutError: the server is not ready in time.
    """
    deadline = time.monotonic() + START_TIMEOUT
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"the server ended with exit code {process.returncode}")
        with contextlib.suppress(requests.RequestException):
            if server.get("/health_generate").ok:
                return
        time.sleep(0.5)
    raise TimeoutError(f"the server is not ready after {START_TIMEOUT} s")
