"""Asks items of real servers, and remembers every answer: an interrupted evaluation goes on where it was."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.progress import Progress

from benchmark import report
from benchmark.quality.documents import Item
from benchmark.quality.forcing import forcing
from benchmark.quality.policies import Policy
from sglang_oasis.testing.server import Server, launch_server

PREFILLED, DECODED = "prefilled", "decoded"
CHUNK = 2048
"""Tokens of a prompt that are prefilled at a time."""
READINGS = (PREFILLED, DECODED)
"""How a question is read: with the prompt, densely; or token by token, with the working set of its step."""


@dataclass(frozen=True)
class Answer:
    """What a server said to an item.

    Attributes:
        policy, budget: how it attended.
        task, context, number: which item.
        reading: how the question was read.
        score: 0 to 1.
        text: the answer, without its given beginning.
        asked: what the answer depends on besides, see `fingerprint`.
    """

    policy: str
    budget: int
    task: str
    context: int
    reading: str
    number: int
    score: float
    text: str
    asked: str

    @property
    def key(self) -> Key:
        return (self.policy, self.budget, self.task, self.context, self.reading, self.number, self.asked)


Key = tuple[str, int, str, int, str, int, str]


def key_of(policy: Policy, item: Item, reading: str, dtype: str) -> Key:
    asked = fingerprint(policy, item, dtype)
    return (policy.name, policy.budget, item.task.name, item.context, reading, item.number, asked)


def fingerprint(policy: Policy, item: Item, dtype: str) -> str:
    """Eight hexadecimal digits of the server's flags and of the tokens that it is given."""
    return hashlib.sha256(repr((policy.flags, dtype, item.digest)).encode()).hexdigest()[:8]


class Store:
    """Answers, one JSON object per line, appended as they come.

    Args:
        file: made when it is not there.
    """

    def __init__(self, file: Path) -> None:
        self._file, self._lock = file, threading.Lock()
        file.parent.mkdir(parents=True, exist_ok=True)
        lines = file.read_text().splitlines() if file.exists() else []
        self._answers = {answer.key: answer for answer in (Answer(**json.loads(line)) for line in lines if line)}

    def add(self, answer: Answer) -> None:
        with self._lock, self._file.open("a") as lines:
            self._answers[answer.key] = answer
            lines.write(json.dumps(asdict(answer)) + "\n")

    def get(self, key: Key) -> Answer | None:
        return self._answers.get(key)


@dataclass(frozen=True)
class Serving:
    """How servers are started.

    Attributes:
        model: folder of the model.
        dtype: of the computation.
        concurrency: documents that are asked about at a time.
    """

    model: Path
    dtype: str
    concurrency: int

    @contextlib.contextmanager
    def server(self, policy: Policy, context: int) -> Iterator[Server]:
        tokens = 2 * self.concurrency * context  # so that the documents at hand stay in the prefix cache
        flags = (
            *("--dtype", self.dtype, "--context-length", str(context), "--chunked-prefill-size", str(CHUNK)),
            "--disable-overlap-schedule",  # `ForcedTokens` must see a request as it is in the step at hand
            *("--max-running-requests", str(self.concurrency), "--enable-custom-logit-processor"),
            *("--max-total-tokens", str(tokens)),
        )
        with launch_server(*policy.flags, *flags, model=self.model) as server:
            yield server


def evaluate(serving: Serving, tokenizer: Any, policy: Policy, asked: Sequence[tuple[Item, str]], store: Store) -> None:
    """Ask (item, reading) pairs of one server, those that were not asked yet; several documents at a time.

    Items of one document are asked one after the other, so that the first one leaves the document in the prefix cache.
    """
    pending = [
        (item, reading) for item, reading in asked if store.get(key_of(policy, item, reading, serving.dtype)) is None
    ]
    if not pending:
        return
    context = max(item.context for item, _ in pending)
    groups = [list(group) for _, group in itertools.groupby(pending, key=lambda one: _shared(one[0]))]
    with serving.server(policy, context) as server, Progress(console=report.STDERR) as progress:
        bar = progress.add_task(policy.label, total=len(pending))

        def ask_all(group: Iterable[tuple[Item, str]]) -> None:
            for item, reading in group:
                store.add(ask(server, tokenizer, policy, item, reading, serving.dtype))
                progress.advance(bar)

        with ThreadPoolExecutor(serving.concurrency) as clients:
            list(clients.map(ask_all, groups))


def _shared(item: Item) -> tuple[str, int, int]:
    """Items with the same value have a prefix in common."""
    return item.task.name, item.context, item.document // item.task.same_filler


def ask(server: Server, tokenizer: Any, policy: Policy, item: Item, reading: str, dtype: str) -> Answer:
    """Greedy; the answer ends at its first end-of-text token, wherever the server ends it."""
    prompt, given = [*item.prefix, *item.question], 0
    fields: dict[str, Any] = {"sampling": {}}
    if reading == DECODED:
        prompt, given = list(item.prefix), len(item.question)
        fields = forcing(forced=list(item.question))
    fields["sampling"]["ignore_eos"] = True
    answer = server.generate(prompt, max_new_tokens=given + item.task.output, **fields)
    tokens = answer["output_ids"][given:]
    if tokenizer.eos_token_id in tokens:
        tokens = tokens[: tokens.index(tokenizer.eos_token_id)]
    text = tokenizer.decode(tokens)
    score = item.task.score_of(item.asked.beginning + text, item.asked.expected)
    *key, asked = key_of(policy, item, reading, dtype)
    return Answer(*key, score, text, asked)
