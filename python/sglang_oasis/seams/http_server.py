"""Checks the port before the model is loaded, adds `GET /lookahead_kv/stats`, and answers 400 to what is refused.

Read from sglang 0.5.23: `entrypoints/http_server.launch_server` (BEFORE: no process has been spawned),
`entrypoints/http_server._setup_and_run_http_server` (BEFORE: the app exists, no request has been served),
`tokenizer_manager.get_internal_state` (one answer per data-parallel rank).
"""

from __future__ import annotations

from typing import Any

from sglang_oasis.seams.catalogue import Seam
from sglang_oasis.seams.internal_state import STATE_KEY
from sglang_oasis.seams.launch_environment import check_port
from sglang_oasis.seams.server_args import enabled, uses_host_pool

STATS_PATH = "/lookahead_kv/stats"


async def lookahead_kv_stats() -> dict[str, list[Any]]:
    """Statistics of every data-parallel rank, see docs/observability.md."""
    from sglang.srt.entrypoints.http_server import get_global_state

    states = await get_global_state().tokenizer_manager.get_internal_state()
    return {"ranks": [state.get(STATE_KEY) for state in states]}


async def refused(request: Any, error: Exception) -> Any:
    """The answer where an endpoint, unlike most, does not answer 400 to a ValueError itself; in the form of those."""
    from fastapi.responses import JSONResponse

    return JSONResponse({"error": {"message": str(error)}}, status_code=400)


def _check_port(server_args: Any, *args: Any, **kwargs: Any) -> None:
    if uses_host_pool(server_args) and server_args.node_rank == 0:
        check_port(server_args.host, server_args.port)


def _complete_app(server_args: Any, *args: Any, **kwargs: Any) -> None:
    from sglang.srt.entrypoints.http_server import app

    known = {getattr(route, "path", None) for route in app.routes}
    if enabled(server_args) and STATS_PATH not in known:
        app.add_api_route(STATS_PATH, lookahead_kv_stats, methods=["GET"])
    app.add_exception_handler(ValueError, refused)


SEAMS = [
    Seam("entrypoints.http_server.launch_server", _check_port, "BEFORE"),
    Seam("entrypoints.http_server._setup_and_run_http_server", _complete_app, "BEFORE"),
]
