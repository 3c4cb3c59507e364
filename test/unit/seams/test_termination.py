"""SIGTERM stays the program's where an Engine runs in it (real signals, no server)."""

from __future__ import annotations

import asyncio
import signal
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_oasis.seams import termination


def take_sigterm(manager: Any) -> None:
    """What SGLang does in `TokenizerManager.auto_create_handle_loop`."""
    manager.event_loop = asyncio.get_running_loop()
    manager.event_loop.add_signal_handler(signal.SIGTERM, lambda: manager.heard.append("SGLang"))


async def terminated(manager: Any) -> list[str]:
    termination._leave_sigterm_to_the_program(take_sigterm, manager)
    signal.raise_signal(signal.SIGTERM)
    await asyncio.sleep(0)  # asyncio hears it in the next round, or the one after
    await asyncio.sleep(0.01)
    return manager.heard


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(termination, "uses_host_pool", lambda args: True)
    return SimpleNamespace(_server_stop_hook=None, event_loop=None, server_args=None, heard=[])


def test_a_handler_of_the_programs_event_loop_stays(engine: Any) -> None:
    async def program() -> list[str]:
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, engine.heard.append, "the loop")
        return await terminated(engine)

    assert asyncio.run(program()) == ["the loop"]


def test_a_handler_of_the_program_stays(engine: Any) -> None:
    before = signal.signal(signal.SIGTERM, lambda *_: engine.heard.append("the program"))
    try:
        assert asyncio.run(terminated(engine)) == ["the program"]
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_server_hears_sigterm_as_sglang_does(engine: Any) -> None:
    engine._server_stop_hook = object()
    before = signal.getsignal(signal.SIGTERM)
    try:
        assert asyncio.run(terminated(engine)) == ["SGLang"]
    finally:
        signal.signal(signal.SIGTERM, before)
