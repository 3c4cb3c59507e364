"""Needles in a haystack (RULER, section 3.1): one, one of many, all values of one key, the values of several keys."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from benchmark.quality.documents import Draft, Question, Task, report_with
from benchmark.quality.tasks.names import keys, number, uuid

ABOUT = "Some special magic values are hidden within the following text. Memorize them. I will ask about them later."
DEPTHS = 10
QUESTIONS = 10


def fact(key: str, value: str) -> str:
    return f"One of the special magic values for {key} is: {value}."


def ask(key: str, value: str) -> Question:
    beginning = f"The special magic value for {key} mentioned in the text is:"
    return Question(f"What is the special magic value for {key} mentioned in the text?", beginning, (value,))


def single(value: Callable[[Random], str]) -> Callable[[Random, int, int], Draft]:
    """One needle; ten documents have it at ten depths of one text, the deepest first, so that they share a prefix."""

    def write(chance: Random, document: int, facts: int) -> Draft:
        (key,), right = keys(chance, 1), value(chance)
        depth = 1 - (document % DEPTHS + 0.5) / DEPTHS
        return Draft(report_with([fact(key, right)], ABOUT), [ask(key, right)], (depth, 1 - depth))

    return write


def one_of_many(value: Callable[[Random], str]) -> Callable[[Random, int, int], Draft]:
    def write(chance: Random, document: int, facts: int) -> Draft:
        values = {key: value(chance) for key in keys(chance, facts)}
        asked = chance.sample(list(values), min(QUESTIONS, facts))
        text = report_with([fact(key, right) for key, right in values.items()], ABOUT)
        return Draft(text, [ask(key, values[key]) for key in asked])

    return write


def all_values(chance: Random, document: int, facts: int) -> Draft:
    """Each key has four values, far from each other."""
    values = {key: [number(chance, 7) for _ in range(4)] for key in keys(chance, max(1, facts // 4))}
    pairs = [(key, right) for key, rights in values.items() for right in rights]
    chance.shuffle(pairs)
    questions = [
        Question(
            f"What are all the special magic values for {key} mentioned in the text?",
            f"The special magic values for {key} mentioned in the text are:",
            tuple(values[key]),
        )
        for key in list(values)[:QUESTIONS]
    ]
    return Draft(report_with([fact(*pair) for pair in pairs], ABOUT), questions)


def several_keys(chance: Random, document: int, facts: int) -> Draft:
    """A question asks for the values of four keys."""
    values = {key: number(chance, 7) for key in keys(chance, max(4, facts))}
    questions = []
    for _ in range(QUESTIONS):
        asked = chance.sample(list(values), 4)
        named = ", ".join(asked)
        questions.append(
            Question(
                f"What are the special magic values for {named} mentioned in the text?",
                f"The special magic values for {named} mentioned in the text are:",
                tuple(values[key] for key in asked),
            )
        )
    return Draft(report_with([fact(*pair) for pair in values.items()], ABOUT), questions)


def seven_digits(chance: Random) -> str:
    return number(chance, 7)


TASKS = (
    Task("needle", single(seven_digits), output=16, same_filler=DEPTHS),
    Task("needle, UUID", single(uuid), output=48, same_filler=DEPTHS),
    Task("needle of many", one_of_many(seven_digits), output=16),
    Task("needle of many, UUID", one_of_many(uuid), output=48),
    Task("all values of a key", all_values, output=64),
    Task("values of four keys", several_keys, output=64),
)
