"""How the quickstart starts, watches and ends its server, with a stand-in for the server."""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
sys.path.insert(0, str(EXAMPLES))
server_process = importlib.import_module("server_process")

TIMEOUT_S = 60

SERVER = """
import http.server, json, os, pathlib, sys, threading, time

class Handler(http.server.BaseHTTPRequestHandler):
    tokens = 0

    def do_GET(self):
        {on_request}
        if self.path == "/health":
            self.send_response(200)
            self.end_headers()
            return
        Handler.tokens += 256
        body = json.dumps({{"loads": [{{"total_prefill_uncached_tokens": Handler.tokens}}]}}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args):
        pass

{at_start}
port = int(sys.argv[sys.argv.index("--port") + 1])
http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of a package `sglang` that children find first; SIGINT is what it was when a test ends."""
    before = signal.getsignal(signal.SIGINT)
    package = tmp_path / "path" / "sglang"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    monkeypatch.setenv("PYTHONPATH", str(package.parent))
    yield package
    signal.signal(signal.SIGINT, before)


def write(stand_in: Path, at_start: str = "", on_request: str = "pass") -> None:
    (stand_in / "launch_server.py").write_text(SERVER.format(at_start=at_start, on_request=on_request))


@pytest.fixture
def short_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_process, "STALL_S", 2.0)
    monkeypatch.setattr(server_process, "WORK_S", 0.04)


def is_alive(pid: int) -> bool:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, 0)
        return True
    return False


def test_a_server_is_waited_for_and_ended(stand_in: Path, tmp_path: Path) -> None:
    write(stand_in)
    with server_process.running_server(["--flag"], tmp_path / "log") as server:
        assert server.prefill() == 256
        assert is_alive(server.process.pid)
    assert server.process.returncode is not None


def test_a_server_that_ends_while_it_starts_is_told_with_what_it_said(stand_in: Path, tmp_path: Path) -> None:
    write(stand_in, at_start='print("some line"); print("error: no model there"); print("bye"); sys.exit(1)')
    with (
        pytest.raises(server_process.ServerError, match=r"has ended; .*/log says: error: no model there$"),
        server_process.running_server([], tmp_path / "log"),
    ):
        pass


@pytest.mark.usefixtures("short_patience")
def test_a_slow_start_is_waited_for_as_long_as_it_works(stand_in: Path, tmp_path: Path) -> None:
    write(stand_in, at_start="end = time.process_time() + 3.5\nwhile time.process_time() < end: pass")
    with server_process.running_server([], tmp_path / "log"):
        pass


@pytest.mark.usefixtures("short_patience")
def test_a_start_that_hangs_is_given_up(stand_in: Path, tmp_path: Path) -> None:
    write(stand_in, at_start="time.sleep(600)")
    with (
        pytest.raises(server_process.ServerError, match=r"has done nothing for 2\.0 s"),
        server_process.running_server([], tmp_path / "log"),
    ):
        pass


@pytest.mark.usefixtures("short_patience")
@pytest.mark.parametrize(
    ("fault", "sentence"), [("time.sleep(600)", "has done nothing"), ("os._exit(1)", "The server has ended")]
)
def test_who_waits_for_an_answer_hears_when_there_will_be_none(
    stand_in: Path, tmp_path: Path, fault: str, sentence: str
) -> None:
    write(stand_in, on_request=f'if self.path == "/answer": {fault}')
    with (
        pytest.raises(server_process.ServerError, match=sentence) as raised,
        server_process.running_server([], tmp_path / "log") as server,
        server_process.watched(server, lambda: None),
    ):
        server.get("/answer", timeout=TIMEOUT_S)
    assert not isinstance(raised.value.__cause__, httpx.TimeoutException), "who waits is woken"


def test_what_is_watched_sees_the_tokens_grow(stand_in: Path, tmp_path: Path) -> None:
    write(stand_in)
    seen: list[int] = []
    with (
        server_process.running_server([], tmp_path / "log") as server,
        server_process.watched(server, lambda: seen.append(server.prefill())),
    ):
        deadline = time.monotonic() + TIMEOUT_S
        while len(seen) < 2 and time.monotonic() < deadline:
            time.sleep(0.05)
    assert seen[:2] == [256, 512]


@pytest.mark.parametrize(
    ("said", "stage"),
    [
        ("", "importing it, which takes longer the first time"),
        ("server_args=...\nLoad weight begin. avail mem=1 GB\n", "loading the model"),
        ("Load weight begin.\nLoad weight end.\n", "making the KV pools"),
        ("Load weight end.\nINFO: Application startup complete.\n", "answering a first request"),
    ],
)
def test_the_log_says_how_far_a_start_is(tmp_path: Path, said: str, stage: str) -> None:
    (tmp_path / "log").write_text(said)
    assert server_process._stage(tmp_path / "log") == stage


@pytest.mark.parametrize(("text", "low", "high"), [("32768\t60999\n", 32768, 60999), ("1024 40000", 1024, 40000)])
def test_ports_lie_outside_those_of_outgoing_connections(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, low: int, high: int
) -> None:
    (tmp_path / "range").write_text(text)
    monkeypatch.setattr(server_process, "PORT_RANGE", tmp_path / "range")
    for _ in range(50):
        port = server_process.free_port()
        assert port >= 10000
        assert not low <= port <= high


def test_a_range_that_leaves_no_port_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "range").write_text("1024 65535")
    monkeypatch.setattr(server_process, "PORT_RANGE", tmp_path / "range")
    with pytest.raises(server_process.ServerError, match="No port"):
        server_process.free_port()


@pytest.mark.parametrize("moment", ["start", "answer"])
@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGTERM])
def test_an_interruption_ends_the_server(stand_in: Path, tmp_path: Path, moment: str, sign: signal.Signals) -> None:
    waiting, pid = tmp_path / "waiting", tmp_path / "pid"
    tell = f"pathlib.Path({str(pid)!r}).write_text(str(os.getpid())); pathlib.Path({str(waiting)!r}).touch()"
    hang = f"{tell}; time.sleep(600)"
    if moment == "start":
        write(stand_in, at_start=hang)
    else:
        write(stand_in, on_request=f'if self.path == "/answer": {hang}')
    program = (
        "import pathlib, signal, sys, server_process as s\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))\n"
        "try:\n"
        f"    with s.running_server([], pathlib.Path({str(tmp_path / 'log')!r})) as server:\n"
        "        with s.watched(server, lambda: None):\n"
        "            server.get('/answer')\n"
        "except KeyboardInterrupt:\n"
        "    sys.exit(130)\n"
    )
    client = subprocess.Popen(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": f"{EXAMPLES}:{stand_in.parent}"},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    deadline = time.monotonic() + TIMEOUT_S
    while not waiting.exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    client.send_signal(sign)
    assert client.wait(TIMEOUT_S) == 128 + sign
    assert not is_alive(int(pid.read_text()))
