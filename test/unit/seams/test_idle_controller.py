"""The data-parallel controller's own loop waits for requests instead of asking for them again and again."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import zmq
from sglang.srt import runtime_context
from sglang.srt.managers.data_parallel_controller import DataParallelController
from sglang.srt.managers.io_struct import ReleaseMemoryOccupationReqInput, sock_send

from sglang_oasis.seams import idle_controller

LIMIT = 20


class LoopEnded(Exception):
    """Of the test's making: the loop has no end of its own."""


class Controller:
    """What the loop needs of a controller; ends it after so many rounds or when a request came."""

    def __init__(self, receiver: Any, rounds: int) -> None:
        self.server_args = SimpleNamespace(enable_lookahead_kv=True, attention_backend=None)
        self.recv_from_tokenizer = receiver
        self.soft_watchdog = self
        self.rounds_left, self.received = rounds, 0

    def feed(self) -> None:
        if self.rounds_left == 0:
            raise LoopEnded
        self.rounds_left -= 1

    def _request_dispatcher(self, request: Any) -> None:
        self.received += 1
        raise LoopEnded

    def run(self) -> None:
        idle_controller._wait_for_requests(self)
        with pytest.raises(LoopEnded):
            DataParallelController.event_loop(self)


@pytest.fixture
def sockets() -> Iterator[tuple[Any, Any]]:
    context = zmq.Context()
    receiver, sender = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    receiver.bind("inproc://requests")
    sender.connect("inproc://requests")
    yield receiver, sender
    context.destroy(linger=0)


@pytest.fixture
def sleeps(monkeypatch: pytest.MonkeyPatch) -> Any:
    def choose(asleep: bool) -> None:
        monkeypatch.setattr(runtime_context, "get_device", lambda: SimpleNamespace(sleep_on_idle=asleep))

    return choose


def test_a_request_ends_the_wait_in_the_first_round(
    sockets: tuple[Any, Any], sleeps: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loop that did not wait would have used up its rounds long before the request is sent."""
    receiver, sender = sockets
    monkeypatch.setattr(idle_controller, "WAIT_MS", 1000 * LIMIT)
    sleeps(True)
    controller = Controller(receiver, rounds=1)
    timer = threading.Timer(0.2, sock_send, (sender, ReleaseMemoryOccupationReqInput()))
    timer.start()
    controller.run()
    timer.join()
    assert controller.received == 1


def test_without_a_request_it_goes_on_now_and_then(
    sockets: tuple[Any, Any], sleeps: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(idle_controller, "WAIT_MS", 1)
    sleeps(True)
    controller = Controller(sockets[0], rounds=3)
    controller.run()
    assert (controller.rounds_left, controller.received) == (0, 0)


def test_a_controller_that_is_to_poll_keeps_its_socket(sockets: tuple[Any, Any], sleeps: Any) -> None:
    sleeps(False)
    controller = Controller(sockets[0], rounds=2)
    controller.run()
    assert controller.recv_from_tokenizer is sockets[0]
