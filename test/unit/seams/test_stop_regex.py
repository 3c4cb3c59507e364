"""The search for a stop_regex ends, whatever the pattern."""

from __future__ import annotations

import re
import signal
import time
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_oasis.seams import stop_regex


def request(*patterns: str) -> Any:
    return SimpleNamespace(sampling_params=SimpleNamespace(stop_regex_strs=patterns))


def test_a_search_that_backtracks_without_end_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stop_regex, "LONGEST_SEARCH", 0.1)
    started = time.monotonic()
    endless = request("(a+)+b")
    assert not stop_regex._bounded(lambda request: re.search("(a+)+b", "a" * 60), endless)
    aborted = endless.finished_reason.to_json()
    assert aborted["status_code"] == 400
    assert "takes longer than 0.1 s" in aborted["message"]
    assert time.monotonic() - started < 30  # it would take years


def test_nothing_of_the_limit_outlives_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    timers: list[tuple[float, float]] = []
    monkeypatch.setattr(signal, "setitimer", lambda which, *timer: timers.append(timer) or (7.0, 0.0))
    before = signal.getsignal(signal.SIGALRM)
    assert stop_regex._bounded(lambda request: True, request("a"))
    assert timers == [(stop_regex.LONGEST_SEARCH,), (7.0, 0.0)]
    assert signal.getsignal(signal.SIGALRM) == before


def test_a_request_without_a_pattern_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signal, "setitimer", None)
    assert stop_regex._check(lambda request: True, request())


class Ranks:
    """Tensor-parallel ranks, as one of them sees them."""

    def __init__(self, rank: int, said: Any = None) -> None:
        self.rank_in_group, self.said = rank, said

    def broadcast_object(self, verdict: Any) -> Any:
        if self.rank_in_group == 0:
            self.said = verdict
        return self.said


def test_ranks_come_to_the_same_end(monkeypatch: pytest.MonkeyPatch) -> None:
    def ends(request: Any) -> bool:
        request.finished_reason, request.finished_len = "matched", 7
        return True

    def does_not_search(request: Any) -> bool:
        raise AssertionError

    def unfinished() -> Any:
        fresh = request("a")
        fresh.finished_reason = fresh.finished_len = None
        return fresh

    first, other = Ranks(0), unfinished()
    monkeypatch.setattr(stop_regex, "_ranks", lambda: first)
    assert stop_regex._check(ends, unfinished())
    monkeypatch.setattr(stop_regex, "_ranks", lambda: Ranks(1, first.said))
    assert stop_regex._check(does_not_search, other)
    assert (other.finished_reason, other.finished_len) == ("matched", 7)
