"""A control request that fails in the scheduler is answered with its failure, and ends nothing."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
from sglang.srt.managers import io_struct
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.managers.scheduler_components.profiler_manager import SchedulerProfilerManager

from sglang_oasis.seams import control_requests
from sglang_oasis.seams.control_requests import failure


def fails(*args: Any) -> Any:
    raise RuntimeError("broken")


def guarded(kind: type, handler: Any) -> Any:
    """What becomes of the handler of a kind of request."""
    handlers = {kind: handler}
    control_requests._guard_handlers(None, SimpleNamespace(_request_dispatcher=SimpleNamespace(_mapping=handlers)))
    return handlers[kind]


def test_a_handler_that_fails_answers_so() -> None:
    handler = guarded(io_struct.BeginWeightUpdateReqInput, fails)
    answer = handler(io_struct.BeginWeightUpdateReqInput())
    assert isinstance(answer, io_struct.BeginWeightUpdateReqOutput)
    assert not answer.success
    assert answer.message == "BeginWeightUpdateReqInput failed (RuntimeError: broken)."


def test_a_handler_that_answers_is_heard() -> None:
    assert guarded(io_struct.SlowDownReqInput, lambda request: 7)(io_struct.SlowDownReqInput(forward_sleep_time=1)) == 7


@pytest.mark.parametrize("name", control_requests.NOT_GUARDED)
def test_requests_to_generate_are_not_guarded(name: str) -> None:
    assert guarded(getattr(io_struct, name), fails) is fails


@pytest.mark.parametrize(
    ("request_", "expected"),
    [
        (io_struct.OpenSessionReqInput(capacity_of_str_len=1, session_id="s"), {"session_id": "s", "success": False}),
        (io_struct.SetInternalStateReq(server_args={}), {"updated": False}),
        (io_struct.GetWeightsByNameReqInput(name="x"), {"parameter": None}),
        (io_struct.LoadLoRAAdapterReqInput(lora_name="x", lora_path="y"), {"success": False, "error_message": "why"}),
        (io_struct.UpdateWeightFromDiskReqInput(model_path="x"), {"success": False, "message": "why"}),
        (io_struct.FlushCacheReqInput(), {"success": False, "message": "why"}),
    ],
)
def test_each_kind_of_answer_says_that_it_failed(request_: Any, expected: dict[str, Any]) -> None:
    answer = failure(request_, "why")
    assert {name: getattr(answer, name) for name in expected} == expected


def test_whatever_the_scheduler_handles_may_fail() -> None:
    scheduler = MagicMock()
    Scheduler.init_request_dispatcher(scheduler)
    guarded_kinds = [
        kind for kind in scheduler._request_dispatcher._mapping if kind.__name__ not in control_requests.NOT_GUARDED
    ]
    assert len(guarded_kinds) > 30
    for kind in guarded_kinds:
        failure(type(kind.__name__, (), {})(), "why")  # raises nothing: that would end the scheduler


def test_what_has_no_answer_gets_none() -> None:
    assert failure(io_struct.CloseSessionReqInput(session_id="s"), "why") is None


def test_a_group_that_nobody_joins_is_given_up() -> None:
    def init(*args: Any, timeout: timedelta | None = None) -> timedelta | None:
        return timeout

    assert control_requests._bounded_group(init, "gloo") == control_requests.LONGEST_RENDEZVOUS
    assert control_requests._bounded_group(init, timeout=timedelta(1)) == timedelta(1)


def test_a_profile_that_fails_between_two_batches_is_forgotten() -> None:
    manager = SchedulerProfilerManager.__new__(SchedulerProfilerManager)
    manager.profile_in_progress = manager.profile_by_stage = True
    manager.profiler_target_forward_ct = 5
    control_requests._profile_batch(fails, manager, None)
    assert not manager.profile_in_progress
    assert not manager.profile_by_stage
    assert manager.profiler_target_forward_ct is None
