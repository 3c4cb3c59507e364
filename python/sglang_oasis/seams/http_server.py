"""Checks the port before the model is loaded, listens before the warm-up, adds `GET /lookahead_kv/stats`, and answers
refused requests with status 400.

Read from sglang 0.5.23: `entrypoints/http_server.launch_server` (BEFORE: no process has been spawned),
`entrypoints/http_server._setup_and_run_http_server` (AROUND: the app exists, no request has been served; when it
returns or fails, the launcher ends the other processes), `tokenizer_manager.get_internal_state` (one answer per
data-parallel rank). Read from uvicorn 0.54: `server.Server.startup` (AROUND: it would start SGLang's warm-up before it
notices that it cannot listen, and then wait for the warm-up, which waits for the server).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_oasis.seams.flags import enabled, uses_host_pool
from sglang_oasis.seams.internal_state import STATE_KEY
from sglang_oasis.seams.launch_environment import check_port, listen
from sglang_oasis.seams.seam import Seam
from sglang_oasis.seams.termination import serves_sglang

STATS_PATH = "/lookahead_kv/stats"


async def lookahead_kv_stats() -> dict[str, list[Any]]:
    """Return the statistics of every data-parallel rank; docs/observability.md explains them."""
    from sglang.srt.entrypoints.http_server import get_global_state

    states = await get_global_state().tokenizer_manager.get_internal_state()
    return {"ranks": [state.get(STATE_KEY) for state in states]}


async def refused(request: Any, error: Exception) -> Any:
    """Answer a ValueError with status 400 in SGLang's format, for the few endpoints that do not do so themselves."""
    from fastapi.responses import JSONResponse

    return JSONResponse({"error": {"message": str(error)}}, status_code=400)


def _check_port(server_args: Any, *args: Any, **kwargs: Any) -> None:
    if uses_host_pool(server_args) and server_args.node_rank == 0:
        check_port(server_args.host, server_args.port)


def _run_http_server(original: Callable[..., Any], server_args: Any, *args: Any, **kwargs: Any) -> Any:
    from sglang.srt.entrypoints.http_server import get_global_state

    _complete_app(server_args)
    try:
        return original(server_args, *args, **kwargs)
    finally:
        if uses_host_pool(server_args):
            # The launcher now ends the other processes; the watchdog would take this for a crash and hide the reason.
            get_global_state().tokenizer_manager._subprocess_watchdog.stop()


def _complete_app(server_args: Any) -> None:
    from sglang.srt.entrypoints.http_server import app

    known = {getattr(route, "path", None) for route in app.routes}
    if enabled(server_args) and STATS_PATH not in known:
        app.add_api_route(STATS_PATH, lookahead_kv_stats, methods=["GET"])
    app.add_exception_handler(ValueError, refused)


async def _start_up(original: Callable[..., Any], server: Any, sockets: Any = None) -> None:
    if sockets is not None or not serves_sglang(server):
        await original(server, sockets=sockets)
        return
    listening = listen(server.config.host, server.config.port, server.config.backlog)
    await original(server, sockets=listening)
    server._log_started_message(listening)  # uvicorn does not log it for sockets that it was given


SEAMS = [
    Seam("entrypoints.http_server.launch_server", _check_port, "BEFORE"),
    Seam("entrypoints.http_server._setup_and_run_http_server", _run_http_server, "AROUND"),
    Seam("uvicorn.server.Server.startup", _start_up, "AROUND"),
]
