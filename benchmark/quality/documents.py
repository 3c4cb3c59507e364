"""Documents of a given number of tokens, with facts in them, and questions on these facts.

A document and its questions are one conversation: what precedes the question is the same for all questions on it, so
the server's prefix cache has it after the first.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from random import Random
from typing import Any

from benchmark.holes import HOLE, fill_holes

ASKED = "<asked>"
"""Stands in a conversation for the question."""


@dataclass(frozen=True)
class Question:
    """Something that is asked about a document.

    Attributes:
        text: the question.
        beginning: what the answer is made to begin with, so that a small model gets to the point.
        expected: what a right answer holds.
    """

    text: str
    beginning: str
    expected: tuple[str, ...]


@dataclass(frozen=True)
class Draft:
    """A conversation that is not yet as long as it will be.

    Attributes:
        messages: role and content; contents have HOLEs, and the last one has ASKED.
        questions: on it.
        shares: of the filler text that each hole gets; None for equal ones.
    """

    messages: Sequence[dict[str, str]]
    questions: Sequence[Question]
    shares: Sequence[float] | None = None


@dataclass(frozen=True)
class Task:
    """A kind of documents and questions.

    Attributes:
        name: as shown and stored.
        write: (source of chance, number of the document, facts that a document of its length may have) -> a draft.
        output: most tokens of an answer.
        same_filler: so many documents, one after the other, have the same filler text.
        score: (answer with its beginning, what is expected) -> 0 to 1.
    """

    name: str
    write: Callable[[Random, int, int], Draft]
    output: int
    same_filler: int = 1
    score: Callable[[str, Sequence[str]], float] | None = None

    def score_of(self, answer: str, expected: Sequence[str]) -> float:
        return (self.score or share_found)(answer, expected)


@dataclass(frozen=True)
class Item:
    """A question, ready to be asked.

    Attributes:
        task: its kind.
        context: tokens that it may take, answer included.
        document, number: number of its document, and its own among all of its task and context.
        prefix: tokens of everything before the question.
        question: tokens of the question and of all that follows, the answer's beginning included.
        asked: what the question and its right answer were made from.
    """

    task: Task
    context: int
    document: int
    number: int
    prefix: Sequence[int]
    question: Sequence[int]
    asked: Question

    @cached_property
    def digest(self) -> str:
        """Hash of the tokens: what a server is given."""
        return hashlib.sha256(repr(([*self.prefix], [*self.question], self.task.output)).encode()).hexdigest()


TOKENS_PER_FACT = 200
"""A document has at most one fact in so many of its tokens."""
FILLER_TOKENS = 110_000
"""Of the Python language reference, the filler where nothing else is given; it has 113,000 of the reference model's."""
QUESTION_ROOM = 320
"""Tokens that are enough for a question and its answer."""


class Author:
    """Writes documents.

    Args:
        tokenizer: of the model, with a chat template.
        filler: tokens of real text.
        room: tokens that are kept for a question and its answer.
    """

    def __init__(self, tokenizer: Any, filler: Sequence[int], room: int = QUESTION_ROOM) -> None:
        self._tokenizer, self._filler, self._room = tokenizer, filler, room

    def items(self, task: Task, context: int, count: int) -> list[Item]:
        """The first `count` items of a task at a context length; which they are does not depend on `count`."""
        items: list[Item] = []
        document = 0
        while len(items) < count:
            chance = Random(f"{task.name} {context} {document}")
            draft = task.write(chance, document, max(1, (context - self._room) // TOKENS_PER_FACT))
            before, after = self._render(draft.messages)
            prefix = self._filled(before, context, document // task.same_filler, draft.shares)
            for question in draft.questions:
                asked = self._encode(after.replace(ASKED, question.text) + question.beginning)
                if len(asked) + task.output > self._room:
                    raise ValueError(f"a question of {task.name} takes {len(asked)} tokens of {self._room}")
                items.append(Item(task, context, document, len(items), prefix, asked, question))
            document += 1
        return items[:count]

    def _render(self, messages: Sequence[dict[str, str]]) -> tuple[str, str]:
        text = self._tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, tokenize=False)
        before, after = text.split(ASKED)
        return before, ASKED + after

    def _filled(self, text: str, context: int, window: int, shares: Sequence[float] | None) -> list[int]:
        """The text as tokens; its holes are filled so that it has `context` tokens, less the room for a question."""
        size = context - self._room
        start = window * context % max(1, len(self._filler) - size)
        return fill_holes(
            self._encode, text, size, lambda hole, begin, end: self._filler[start + begin : start + end], shares
        )

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)


def report_with(facts: Sequence[str], about: str) -> list[dict[str, str]]:
    """One message: facts, far from each other in a long text, then the question."""
    text = f"{HOLE}\n".join(f"\n{fact}\n" for fact in ("", *facts, ""))
    return [{"role": "user", "content": f"{about}\n{text}\n{ASKED}"}]


def share_found(answer: str, expected: Sequence[str]) -> float:
    """Share of the expected strings that the answer holds as whole words, in any case."""
    found = (re.search(rf"(?<!\w){re.escape(one)}(?!\w)", answer, re.IGNORECASE) for one in expected)
    return sum(one is not None for one in found) / len(expected)
