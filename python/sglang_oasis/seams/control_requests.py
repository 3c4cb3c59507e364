"""A control request (profile, weights, sessions, logging) that fails is answered with its failure and ends nothing.

Read from sglang 0.5.23: `managers/scheduler.Scheduler.init_request_dispatcher` (AFTER: it has filled
`_request_dispatcher`, whose handlers run in the scheduler's loop, where an exception ends the server);
`managers/scheduler_components/profiler_manager.SchedulerProfilerManager`: `_profile`, and `_profile_batch_predicate`,
which runs before each batch; `managers/tokenizer_manager.TokenizerManager`: the methods in SEAMS, whose answers cannot
carry a failure, so that what cannot be served is refused at the door; `utils/common.init_custom_process_group`.
Requests to generate are not guarded here: `request_validation.py` refuses those that would fail. Remove when SGLang's
loop survives a failing handler.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import socket
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import msgspec
import torch

from sglang_oasis.errors import RequestRefused
from sglang_oasis.seams.request_rules import check_range
from sglang_oasis.seams.seam import Seam

logger = logging.getLogger(__name__)

NOT_GUARDED = (
    *("TokenizedGenerateReqInput", "BatchTokenizedGenerateReqInput"),
    *("TokenizedEmbeddingReqInput", "BatchTokenizedEmbeddingReqInput"),
    *("AbortReq", "ShutdownReq", "GetInternalStateReq"),  # nothing in them can be wrong
)
LONGEST_RENDEZVOUS = timedelta(minutes=2)
"""Until a group that nobody joins is given up; the scheduler waits, and its watchdog ends it after five minutes."""
SLOWEST_STEP = 60.0
"""Seconds that a step may be slowed down by; SGLang's watchdog ends a server whose step takes 300."""


def _guard_handlers(result: None, scheduler: Any) -> None:
    """Let each handler of a control request answer with its failure instead of raising it."""
    handlers = scheduler._request_dispatcher._mapping
    for kind, handler in handlers.items():
        if kind.__name__ not in NOT_GUARDED:
            handlers[kind] = functools.partial(_answer, handler)


def _answer(handler: Callable[[Any], Any], request: Any) -> Any:
    try:
        return handler(request)
    except Exception as error:
        logger.exception("%s failed", type(request).__name__)
        return failure(request, f"{type(request).__name__} failed ({type(error).__name__}: {error}).")


def failure(request: Any, message: str) -> Any:
    """SGLang's answer that a control request has failed; None where it has no answer.

    Args:
        request: the control request, `<name>Req` or `<name>ReqInput`.
        message: why; some answers have no room for it, and a few cannot even say that it failed.
    """
    from sglang.srt.managers import io_struct

    output = getattr(io_struct, type(request).__name__.removesuffix("Input") + "Output", None)
    if output is None:
        return None
    said: dict[str, Any] = {
        "success": False,
        "updated": False,
        "message": message,
        "error_message": message,
        "parameter": None,
        "response": [],
        "layout": {},
        "session_id": getattr(request, "session_id", None),
    }
    return output(**{field.name: said[field.name] for field in msgspec.structs.fields(output) if field.name in said})


# --- profiles ---


def _profile(original: Callable[..., Any], manager: Any, request: Any) -> Any:
    from sglang.srt.managers.io_struct import ProfileReqType

    starts = request.req_type == ProfileReqType.START_PROFILE
    if starts and getattr(manager, "profile_in_progress", False):
        return failure(request, "A profile is being taken already: call /stop_profile first.")
    if starts and request.profile_by_stage and not request.num_steps:
        return failure(request, "profile_by_stage needs num_steps, which was not given.")
    try:
        return original(manager, request)
    except Exception as error:
        _give_up(manager)
        return failure(request, f"The profile failed ({type(error).__name__}: {error}).")


def _profile_batch(original: Callable[..., None], manager: Any, batch: Any) -> None:
    try:
        original(manager, batch)
    except Exception:
        _give_up(manager)


def _give_up(manager: Any) -> None:
    """Forget a profile that failed, so that neither the next batch nor the next profile meets it."""
    logger.exception("the profile failed and is given up")
    manager.torch_profiler = manager.rpd_profiler = None
    manager.profile_in_progress = manager.profile_by_stage = False
    manager.profiler_start_forward_ct = manager.profiler_target_forward_ct = None


async def _execute_profile(original: Callable[..., Any], manager: Any, request: Any) -> Any:
    try:
        return await original(manager, request)
    except RuntimeError as error:
        raise RequestRefused(str(error)) from error


# --- refused at the door ---


def _needs_memory_saver(original: Callable[..., Any], manager: Any, *args: Any) -> Any:
    if not manager.server_args.enable_memory_saver:
        raise RequestRefused("The server cannot release its memory: start it with --enable-memory-saver.")
    return original(manager, *args)


def _needs_recorder(original: Callable[..., Any], manager: Any) -> Any:
    if manager.server_args.expert_distribution_recorder_mode is None:
        raise RequestRefused("The server records no experts: start it with --expert-distribution-recorder-mode.")
    return original(manager)


async def _needs_reachable_group(original: Callable[..., Any], manager: Any, request: Any, *args: Any) -> Any:
    """A group of processes is made in the scheduler, which waits for the others; here, what could never come about."""
    if not torch.distributed.is_backend_available(request.backend.lower()):
        raise RequestRefused(
            f"backend must be one that this torch has, such as gloo on a CPU, got {request.backend!r}."
        )
    try:
        await asyncio.get_running_loop().getaddrinfo(request.master_address, None)
    except (socket.gaierror, UnicodeError) as error:
        raise RequestRefused(
            f"master_address must be a host that can be resolved, got {request.master_address!r} ({error})."
        ) from None
    return await original(manager, request, *args)


def _bounded_group(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return original(*args, **{"timeout": LONGEST_RENDEZVOUS, **kwargs})


def _slow_down(original: Callable[..., Any], manager: Any, request: Any, *args: Any) -> Any:
    if request.forward_sleep_time is not None:
        check_range("forward_sleep_time", request.forward_sleep_time, (0.0, SLOWEST_STEP))
    return original(manager, request, *args)


def _configure_logging(original: Callable[..., None], manager: Any, request: Any) -> None:
    log = manager.request_logger
    before = {name: getattr(log, name) for name in ("log_requests", "log_requests_level", "log_requests_format")}
    try:
        original(manager, request)
    except (ValueError, TypeError, LookupError) as error:
        log.configure(**before)  # SGLang has set them by now, and each request that follows would fail
        raise RequestRefused(f"The logging cannot be configured this way: {str(error).rstrip('.')}.") from error


_SCHEDULER = "managers.scheduler.Scheduler"
_PROFILER = "managers.scheduler_components.profiler_manager.SchedulerProfilerManager"
_MANAGER = "managers.tokenizer_manager.TokenizerManager"
SEAMS = [
    Seam(f"{_SCHEDULER}.init_request_dispatcher", _guard_handlers, "AFTER"),
    Seam(f"{_PROFILER}._profile", _profile, "AROUND"),
    Seam(f"{_PROFILER}._profile_batch_predicate", _profile_batch, "AROUND"),
    Seam(f"{_MANAGER}._execute_profile", _execute_profile, "AROUND"),
    Seam(f"{_MANAGER}.release_memory_occupation", _needs_memory_saver, "AROUND"),
    Seam(f"{_MANAGER}.resume_memory_occupation", _needs_memory_saver, "AROUND"),
    Seam(f"{_MANAGER}.start_expert_distribution_record", _needs_recorder, "AROUND"),
    Seam(f"{_MANAGER}.stop_expert_distribution_record", _needs_recorder, "AROUND"),
    Seam(f"{_MANAGER}.dump_expert_distribution_record", _needs_recorder, "AROUND"),
    Seam(f"{_MANAGER}.init_weights_update_group", _needs_reachable_group, "AROUND"),
    Seam(f"{_MANAGER}.init_weights_send_group_for_remote_instance", _needs_reachable_group, "AROUND"),
    Seam("utils.common.init_custom_process_group", _bounded_group, "AROUND"),
    Seam(f"{_MANAGER}.slow_down", _slow_down, "AROUND"),
    Seam(f"{_MANAGER}.configure_logging", _configure_logging, "AROUND"),
]
