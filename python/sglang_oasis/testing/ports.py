"""Ports for servers under test, which no other program takes before the server listens.

They are outside the range from which the kernel assigns ports (those of SGLang's store, gloo and ZeroMQ sockets), and
outside the range from which SGLang picks a port for its ranks (22000 to 29999). A locked file reserves each port as
long as this process lives, so that no two test runs on a machine get the same port.
"""

from __future__ import annotations

import fcntl
import os
import random
import socket
import tempfile
from pathlib import Path

CANDIDATES = (*range(10_000, 22_000), *range(30_000, 65_536))
EPHEMERAL_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")

_held: list[int] = []
"""File descriptors of the lock files."""


def reserve_port() -> int:
    """Return a free port that is reserved for this process until it ends.

    Raises:
        RuntimeError: no port is left.
    """
    folder = Path(tempfile.gettempdir()) / f"sglang-oasis-ports-{os.getuid()}"
    folder.mkdir(exist_ok=True)
    low, high = (int(bound) for bound in EPHEMERAL_RANGE.read_text().split())
    candidates = [port for port in CANDIDATES if not low <= port <= high]
    for port in random.SystemRandom().sample(candidates, len(candidates)):
        lock = os.open(folder / str(port), os.O_CREAT | os.O_RDWR, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            continue
        if _can_be_bound(port):
            _held.append(lock)
            return port
        os.close(lock)
    raise RuntimeError(f"none of {len(candidates)} ports outside {low} to {high} is free: stop programs that use them.")


def _can_be_bound(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("0.0.0.0", port))
        except OSError:
            return False
    return True
