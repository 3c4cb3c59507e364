"""Adds the backends' statistics to a scheduler's answers for `/server_info` and `/lookahead_kv/stats`.

Read from sglang 0.5.23:
`managers/scheduler_components/internal_state.SchedulerInternalStateController.get_internal_state`.
"""

from __future__ import annotations

from typing import Any

from sglang_oasis.config import DENSE_BACKEND_NAME
from sglang_oasis.seams.seam import Seam
from sglang_oasis.serving.dense_backend import DenseAttentionBackend
from sglang_oasis.serving.lookahead_backend import LookaheadBackend

STATE_KEY = "lookahead_kv"


def _add_statistics(result: Any, controller: Any, request: Any) -> Any:
    backend = controller.scheduler.tp_worker.model_runner.attn_backend
    if isinstance(backend, LookaheadBackend):
        result.internal_state[STATE_KEY] = backend.statistics()
    elif isinstance(backend, DenseAttentionBackend):
        clock = backend.clock
        result.internal_state[DENSE_BACKEND_NAME] = {"decode_steps": clock.steps, "step_seconds": dict(clock.seconds)}
    return result


SEAMS = [
    Seam(
        "managers.scheduler_components.internal_state.SchedulerInternalStateController.get_internal_state",
        _add_statistics,
        "AFTER",
    )
]
