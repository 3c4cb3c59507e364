"""Makes SIGTERM and Ctrl-C end a server within a time limit, whatever it is doing.

SGLang waits for its warm-up and for all requests, without a time limit. Here, requests have `GRACE_SECONDS` to finish;
then every process ends.

Read from sglang 0.5.23: `managers/tokenizer_manager.SignalHandler.sigterm_handler` (BEFORE: a server's SIGTERM once it
has had a request), `TokenizerManager.auto_create_handle_loop` there (AROUND: it replaces the SIGTERM handler of a
program with an Engine, but runs only while the Engine generates; the program's handler is restored). Read from
uvicorn 0.54: `server.Server.handle_exit` (BEFORE: Ctrl-C, and SIGTERM before the first request). When SGLang's shutdown
has a time limit, remove this.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

from sglang_oasis.seams.flags import uses_host_pool
from sglang_oasis.seams.seam import Seam

GRACE_SECONDS = 10.0
"""Seconds that requests have to finish; supervisors wait 10 s (Docker) to 30 s (Kubernetes) before they kill."""
EXIT_SECONDS = 3.0
"""Seconds that processes have to end by themselves after all requests have finished."""

logger = logging.getLogger(__name__)
_timer: threading.Timer | None = None


def end_soon(signal_number: int, tokenizer_manager: Any) -> None:
    """Give the requests of this server `GRACE_SECONDS` to finish, then end the server."""
    global _timer
    if _timer is None:
        _timer = threading.Timer(GRACE_SECONDS, _end_now, [signal_number, tokenizer_manager])
        _timer.daemon = True
        _timer.start()


def _end_now(signal_number: int, tokenizer_manager: Any) -> None:
    from sglang.srt.utils import kill_process_tree

    running = len(tokenizer_manager.rid_to_state)
    if running == 0:
        time.sleep(EXIT_SECONDS)
    else:
        name = signal.Signals(signal_number).name
        logger.warning("The server ends %.0f s after %s; unanswered requests: %d.", GRACE_SECONDS, name, running)
    kill_process_tree(os.getpid(), include_parent=False, wait_timeout=None)
    logging.shutdown()
    os._exit(128 + signal_number if running else 0)


def serves_sglang(server: Any) -> bool:
    """Whether a uvicorn server serves SGLang's app, with one of our backends."""
    from sglang.srt.entrypoints.http_server import app

    return server.config.app is app and uses_host_pool(app.server_args)


def _on_sigterm(handler: Any, *args: Any, **kwargs: Any) -> None:
    manager = handler.tokenizer_manager
    if uses_host_pool(manager.server_args):
        end_soon(signal.SIGTERM, manager)


def _on_uvicorns_signal(server: Any, signal_number: int, *args: Any, **kwargs: Any) -> None:
    if serves_sglang(server):
        from sglang.srt.entrypoints.http_server import get_global_state

        end_soon(signal_number, get_global_state().tokenizer_manager)


def _leave_sigterm_to_the_program(original: Callable[..., Any], manager: Any) -> None:
    is_server = manager._server_stop_hook is not None
    first_time = manager.event_loop is None
    in_main_thread = threading.current_thread() is threading.main_thread()
    programs = signal.getsignal(signal.SIGTERM)  # None: not set by Python, which cannot restore it
    served_here = first_time and in_main_thread and uses_host_pool(manager.server_args)
    if is_server or not served_here or programs is None:
        return original(manager)
    in_its_loop = _handler_in_running_loop()
    original(manager)
    if in_its_loop is None:
        manager.event_loop.remove_signal_handler(signal.SIGTERM)
        signal.signal(signal.SIGTERM, programs)
    else:
        manager.event_loop.add_signal_handler(signal.SIGTERM, in_its_loop)
    return None


def _handler_in_running_loop() -> Callable[[], Any] | None:
    """What the program's own event loop does at SIGTERM; asyncio offers no way to ask, and uvloop hides it."""
    try:
        handle = getattr(asyncio.get_running_loop(), "_signal_handlers", {}).get(signal.SIGTERM)
    except RuntimeError:  # no loop is running
        return None
    return None if handle is None else functools.partial(handle._callback, *handle._args)


_MODULE = "managers.tokenizer_manager"
SEAMS = [
    Seam("managers.tokenizer_manager.SignalHandler.sigterm_handler", _on_sigterm, "BEFORE"),
    Seam(
        "managers.tokenizer_manager.TokenizerManager.auto_create_handle_loop", _leave_sigterm_to_the_program, "AROUND"
    ),
    Seam("uvicorn.server.Server.handle_exit", _on_uvicorns_signal, "BEFORE"),
]
