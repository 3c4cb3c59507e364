"""Refuses beam search, because its rows exchange their KV without a new row generation.

Read from sglang 0.5.23: `beam_search/coordinator.BeamCoordinator.validate_and_init`, which returns an error message or
None. AROUND, because the request must be refused before its group is set up.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_oasis.seams.flags import enabled
from sglang_oasis.seams.seam import Seam


def _refuse(original: Callable[..., str | None], coordinator: Any, request: Any, received: Any) -> str | None:
    from sglang.srt.runtime_context import get_server_args

    if enabled(get_server_args()):
        return "Beam search does not work with --enable-lookahead-kv: use beam_width 1."
    return original(coordinator, request, received)


SEAMS = [Seam("beam_search.coordinator.BeamCoordinator.validate_and_init", _refuse, "AROUND")]
