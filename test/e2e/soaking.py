"""Many requests of random lengths on a small pool, some aborted or dropped: no error, no leak, right answers."""

from __future__ import annotations

import contextlib
import http.client
import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from sglang_oasis.testing.server import Server
from test.e2e.in_flight import InFlight
from test.e2e.small_pool import (
    MOST_REQUESTS,
    assert_baseline,
    assert_same_answer,
    finish_type,
    text,
)

REQUESTS = 500
ABORTED, DISCONNECTED = 0.15, 0.15
SHARED_PREFIXES = 4
SAMPLE = 12
SEED = 20


@dataclass(frozen=True)
class Plan:
    """One request and what befalls it.

    Attributes:
        rid: request id.
        prompt: token ids.
        tokens: tokens to generate.
        fate: "finish", "abort" or "disconnect".
        patience: seconds until the fate strikes.
    """

    rid: str
    prompt: list[int]
    tokens: int
    fate: str
    patience: float


def plans() -> list[Plan]:
    chance = random.Random(SEED)
    made = []
    for number in range(REQUESTS):
        length = int(chance.triangular(8, 400, 200))  # 16 at once take more than the pool
        if chance.random() < 0.3:  # half of it is a prefix that others have too
            shared = text(chance.randrange(SHARED_PREFIXES) * 1000, length // 2)
            prompt = shared + text(chance.randrange(5000, 39_000), length - len(shared))
        else:
            prompt = text(chance.randrange(5000, 39_000), length)
        fate = chance.choices(["abort", "disconnect", "finish"], [ABORTED, DISCONNECTED, 1 - ABORTED - DISCONNECTED])[0]
        # Five digits: the server aborts every request whose id begins with what it is given.
        made.append(Plan(f"soak-{number:05d}", prompt, chance.randint(1, 24), fate, chance.uniform(0, 2)))
    return made


def live(server: Server, plan: Plan) -> dict[str, Any] | None:
    """Its answer, None when nobody waited for it."""
    request = InFlight(server, plan.prompt, plan.tokens, rid=plan.rid, return_logprob=True)
    if plan.fate == "finish":
        return request.result()
    time.sleep(plan.patience)
    if plan.fate == "abort":
        assert server.post("/abort_request", rid=plan.rid).ok
        return request.result()
    request.disconnect()
    return None


@contextlib.contextmanager
def health_watched(server: Server) -> Iterator[list[int]]:
    """Ask /health all the time; yields the status codes so far."""
    codes: list[int] = []
    done = threading.Event()

    def watch() -> None:
        while not done.is_set():
            try:
                codes.append(server.get("/health").status_code)
            except OSError:
                codes.append(0)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield codes
    finally:
        done.set()
        thread.join()


def soak(server: Server, requests: list[Plan], comparable: Callable[[Plan], bool]) -> None:
    """Serve the requests side by side, then some of the comparable ones again, alone."""
    assert_baseline(server)
    before = server.tracebacks()  # other tests make requests fail
    with health_watched(server) as health, ThreadPoolExecutor(MOST_REQUESTS) as clients:
        answers = list(clients.map(lambda plan: live(server, plan), requests))
        server.wait_until_idle()

    assert set(health) == {http.client.OK}
    assert len(health) > 5
    assert server.tracebacks() == before

    finished = [(plan, answer) for plan, answer in zip(requests, answers, strict=True) if plan.fate == "finish"]
    assert {finish_type(answer) for _, answer in finished if answer} == {"length"}
    ended = [
        finish_type(answer) for plan, answer in zip(requests, answers, strict=True) if plan.fate == "abort" and answer
    ]
    assert ended.count("abort") > len(ended) // 4, "the aborts came too late"
    assert set(ended) <= {"abort", "length"}  # some had already finished

    assert_baseline(server)
    undisturbed = [
        (plan, answer)
        for plan, answer in finished
        if answer and not answer["meta_info"]["num_retractions"] and comparable(plan)
    ]
    for plan, answer in random.Random(SEED).sample(undisturbed, SAMPLE):
        assert_baseline(server)
        assert_same_answer(answer, InFlight(server, plan.prompt, plan.tokens, return_logprob=True).result())
    assert_baseline(server)
