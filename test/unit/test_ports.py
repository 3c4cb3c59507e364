"""Ports of servers under test."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from test.e2e import ports


def test_a_port_is_given_once_and_never_by_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ports, "LOWEST", 21_980)
    given = [ports.reserve_port() for _ in range(3)]
    assert len(set(given)) == 3
    first_ephemeral = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert all(21_980 <= port <= ports.HIGHEST and port < first_ephemeral for port in given)


def test_a_port_in_use_is_not_given(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        monkeypatch.setattr(ports, "LOWEST", port)
        monkeypatch.setattr(ports, "HIGHEST", port)
        monkeypatch.setattr(ports, "_first_ephemeral", lambda: port + 1)
        with pytest.raises(RuntimeError, match="no port"):
            ports.reserve_port()
