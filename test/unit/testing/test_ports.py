"""Ports of servers under test."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from sglang_oasis.testing import ports


def ephemeral(low: int, high: int, folder: Path) -> Path:
    file = folder / "ip_local_port_range"
    file.write_text(f"{low}\t{high}\n")
    return file


def test_a_port_is_given_once(monkeypatch: pytest.MonkeyPatch) -> None:
    given = [ports.reserve_port() for _ in range(3)]
    assert len(set(given)) == 3
    monkeypatch.setattr(ports, "CANDIDATES", given)
    with pytest.raises(RuntimeError, match="none of"):
        ports.reserve_port()


def test_no_port_is_one_that_the_kernel_hands_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    given = ports.reserve_port()
    beside = [port for port in range(given - 20, given + 20) if port != given]
    monkeypatch.setattr(ports, "CANDIDATES", beside)
    monkeypatch.setattr(ports, "EPHEMERAL_RANGE", ephemeral(given - 20, given + 10, tmp_path))
    assert ports.reserve_port() > given + 10
    monkeypatch.setattr(ports, "EPHEMERAL_RANGE", ephemeral(1024, 65535, tmp_path))
    with pytest.raises(RuntimeError, match="none of 0 ports outside 1024 to 65535"):
        ports.reserve_port()


def test_a_port_in_use_is_not_given(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(ports, "EPHEMERAL_RANGE", ephemeral(1, 1, tmp_path))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        monkeypatch.setattr(ports, "CANDIDATES", [listener.getsockname()[1]])
        with pytest.raises(RuntimeError, match="none of 1 ports"):
            ports.reserve_port()
