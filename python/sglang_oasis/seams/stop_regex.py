"""Limits the time of a `stop_regex`, because a pattern that backtracks for very long would block the scheduler.

Only the first of the tensor-parallel ranks searches, and sends the result to the others: with a clock of their own, the
ranks could get different results.

Read from sglang 0.5.23: `managers/schedule_batch.Req._check_str_based_finish`, which searches in the scheduler's loop,
once per token, and aborts the request if the search raises `re.error`; its results are its return value and the
request's `finished_reason` and `finished_len`. AROUND, because the time limit must end with the search. A signal can
interrupt Python's `re`, which checks for signals while it backtracks. Remove this when upstream
limits the time.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

from sglang_oasis.seams.seam import Seam

LONGEST_SEARCH = 1.0
"""Seconds that all patterns of a request may take per step; a harmless pattern takes microseconds."""


def _check(original: Callable[..., bool], request: Any, *args: Any, **kwargs: Any) -> bool:
    if not request.sampling_params.stop_regex_strs:
        return original(request, *args, **kwargs)
    ranks = _ranks()
    if ranks is None:
        return _bounded(original, request, *args, **kwargs)
    found = ranks.rank_in_group == 0 and _bounded(original, request, *args, **kwargs)
    found, request.finished_reason, request.finished_len = ranks.broadcast_object(
        (found, request.finished_reason, request.finished_len)
    )
    return found


def _ranks() -> Any:
    """Return the group of tensor-parallel ranks, whose schedulers do the same work; None if there is only one rank."""
    from sglang.srt.runtime_context import get_parallel

    return get_parallel().tp_group if get_parallel().tp_size > 1 else None


def _bounded(original: Callable[..., bool], request: Any, *args: Any, **kwargs: Any) -> bool:
    from sglang.srt.managers.schedule_batch import FINISH_ABORT

    previous = signal.signal(signal.SIGALRM, _too_slow)
    timer = signal.setitimer(signal.ITIMER_REAL, LONGEST_SEARCH)
    try:
        return original(request, *args, **kwargs)
    except re.error as error:  # from the second search, for the end of the match; SGLang catches it in the first only
        request.finished_reason = FINISH_ABORT(f"stop_regex: {error}", HTTPStatus.BAD_REQUEST, "BadRequestError")
        return False
    finally:
        signal.setitimer(signal.ITIMER_REAL, *timer)
        signal.signal(signal.SIGALRM, previous)


def _too_slow(number: int, frame: Any) -> None:
    raise re.error(f"the search takes longer than {LONGEST_SEARCH:g} s, give a pattern that backtracks less")


SEAMS = [Seam("managers.schedule_batch.Req._check_str_based_finish", _check, "AROUND")]
