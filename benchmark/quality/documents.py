"""Documents of a given number of tokens, with facts in them, and questions on these facts.

A document and its questions are one conversation: what precedes the question is the same for all questions on it, so
the server's prefix cache has it after the first.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from random import Random
from typing import Any

HOLE = "<hole>"
"""Stands in a conversation for filler text."""
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


TOKENS_PER_FACT = 200
"""A document has at most one fact in so many of its tokens."""
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
        parts = [self._encode(part) for part in text.split(HOLE)]
        room = context - self._room - sum(map(len, parts))
        if room < 0:
            raise ValueError(f"a document takes {context - room} tokens without its filler, more than {context}")
        start = window * context % max(1, len(self._filler) - room)
        if start + room > len(self._filler):
            raise ValueError(f"the filler text has {len(self._filler)} tokens, {room} were asked for")
        holes = len(parts) - 1
        shares = shares or [1 / holes] * holes
        edges = [start + round(room * sum(shares[:i])) for i in range(holes + 1)]
        tokens = parts[0]
        for (begin, end), part in zip(pairwise(edges), parts[1:], strict=True):
            tokens = tokens + list(self._filler[begin:end]) + part
        return tokens

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
