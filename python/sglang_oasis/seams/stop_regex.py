"""Bounds the time of a `stop_regex`: one that backtracks without end would stop the scheduler.

Read from sglang 0.5.23: `managers/schedule_batch.Req._check_str_based_finish`, which searches in the scheduler's loop,
once per token, and aborts the request where the search raises `re.error`. AROUND, because the time limit must end with
the search. A signal can interrupt Python's `re`, which looks for signals while it backtracks. Remove when upstream
bounds the time.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

from sglang_oasis.seams.catalogue import Seam

LONGEST_SEARCH = 1.0
"""Seconds of one step that all patterns of a request may take; an innocent one takes microseconds."""


def _bounded(original: Callable[..., bool], request: Any, *args: Any, **kwargs: Any) -> bool:
    from sglang.srt.managers.schedule_batch import FINISH_ABORT

    if not request.sampling_params.stop_regex_strs:
        return original(request, *args, **kwargs)
    previous = signal.signal(signal.SIGALRM, _too_slow)
    timer = signal.setitimer(signal.ITIMER_REAL, LONGEST_SEARCH)
    try:
        return original(request, *args, **kwargs)
    except re.error as error:  # of the second search, where the match ends: SGLang guards the first one only
        request.finished_reason = FINISH_ABORT(f"stop_regex: {error}", HTTPStatus.BAD_REQUEST, "BadRequestError")
        return False
    finally:
        signal.setitimer(signal.ITIMER_REAL, *timer)
        signal.signal(signal.SIGALRM, previous)


def _too_slow(number: int, frame: Any) -> None:
    raise re.error(f"the search takes longer than {LONGEST_SEARCH:g} s, give a pattern that backtracks less")


SEAMS = [Seam("managers.schedule_batch.Req._check_str_based_finish", _bounded, "AROUND")]
