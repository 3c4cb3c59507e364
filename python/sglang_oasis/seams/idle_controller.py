"""Lets the process that distributes requests to data-parallel ranks sleep when idle, as their schedulers do.

Read from sglang 0.5.23: `managers/data_parallel_controller.DataParallelController.event_loop` (BEFORE: it polls its
socket without a pause, which takes a whole core; `--sleep-on-idle` does not affect it),
`managers/io_struct.sock_recv` (which methods of a socket it calls). When upstream's loop waits, remove this.
"""

from __future__ import annotations

from typing import Any

from sglang_oasis.seams.flags import uses_host_pool
from sglang_oasis.seams.seam import Seam

WAIT_MS = 1000
"""Longest wait for a request, after which the loop continues to feed its watchdog; a request ends the wait early."""


class PatientSocket:
    """A zmq socket that waits for a message for some time before it reports that there is none."""

    def __init__(self, socket: Any) -> None:
        self._socket = socket

    def recv(self, flags: int = 0) -> Any:
        self._socket.poll(WAIT_MS)
        return self._socket.recv(flags=flags)

    def recv_pyobj(self, flags: int = 0) -> Any:
        self._socket.poll(WAIT_MS)
        return self._socket.recv_pyobj(flags=flags)


def _wait_for_requests(controller: Any) -> None:
    from sglang.srt.runtime_context import get_device

    if uses_host_pool(controller.server_args) and get_device().sleep_on_idle:
        controller.recv_from_tokenizer = PatientSocket(controller.recv_from_tokenizer)


SEAMS = [
    Seam("managers.data_parallel_controller.DataParallelController.event_loop", _wait_for_requests, "BEFORE"),
]
