"""Reading: facts of a text as JSON, and which entry of a manual says something."""

from __future__ import annotations

import builtins
import importlib
import inspect
import json
from collections.abc import Sequence
from functools import cache
from random import Random

from benchmark.holes import HOLE
from benchmark.quality.documents import ASKED, Draft, Question, Task, report_with
from benchmark.quality.tasks.names import CITIES, JOBS, number, people

QUESTIONS = 10
MODULES = ("os.path", "json", "random", "shutil", "statistics", "textwrap", "inspect", "calendar", "glob", "tempfile")


def records(chance: Random, document: int, facts: int) -> Draft:
    """People are introduced in sentences; one of them is asked for as JSON."""
    found = {
        name: {
            "age": str(chance.randrange(20, 70)),
            "city": chance.choice(CITIES),
            "job": chance.choice(JOBS),
            "badge": number(chance, 5),
        }
        for name in people(chance, min(facts, 40))
    }
    sentences = [
        f"{name}, {one['age']} years old, works as a {one['job']} in {one['city']} and wears badge {one['badge']}."
        for name, one in found.items()
    ]
    questions = [
        Question(
            f"Write what the text says about {name} as JSON, with the keys name, age, city, job and badge.",
            f'{{"name": "{name}",',
            tuple(f"{key}={value}" for key, value in found[name].items()),
        )
        for name in chance.sample(list(found), min(QUESTIONS, len(found)))
    ]
    return Draft(report_with(sentences, "The following text introduces some people."), questions)


def score_record(answer: str, expected: Sequence[str]) -> float:
    """Share of the fields that are right; 0 for an answer that begins with no JSON object."""
    try:
        found, _ = json.JSONDecoder().raw_decode(answer)
    except ValueError:
        return 0.0
    fields = [one.split("=", 1) for one in expected]
    return sum(isinstance(found, dict) and str(found.get(key)) == value for key, value in fields) / len(fields)


@cache
def _manual() -> list[tuple[str, str, str]]:
    """Entries of Python's manual: name, first sentence, the rest."""
    entries = {}
    for module in (builtins, *map(importlib.import_module, MODULES)):
        for name, thing in sorted(vars(module).items()):
            text = inspect.getdoc(thing) if callable(thing) and not name.startswith("_") else None
            if text and ". " not in name and len(text.split()) >= 8:
                paragraph, _, rest = text.partition("\n\n")
                prefix = "" if module is builtins else f"{module.__name__}."
                entries.setdefault(" ".join(paragraph.split()), (f"{prefix}{name}", rest))
    return [(name, sentence, rest) for sentence, (name, rest) in entries.items() if 40 <= len(sentence) <= 200]


def manual(chance: Random, document: int, facts: int) -> Draft:
    """A manual of functions; a question quotes what an entry says and asks for its name."""
    chosen = chance.sample(_manual(), min(max(1, facts // 2), len(_manual())))
    entries = [f"## {name}\n\n{sentence}\n\n{' '.join(rest.split())[:600]}" for name, sentence, rest in chosen]
    text = f"\n{HOLE}\n".join(["", *entries, ""])
    questions = [
        Question(
            f'Which heading of the manual above is followed by the words "{sentence}"?',
            "The heading is: ##",
            (name,),
        )
        for name, sentence, _ in chance.sample(chosen, min(QUESTIONS, len(chosen)))
    ]
    message = {"role": "user", "content": f"Here is a manual with notes between its entries.\n{text}\n{ASKED}"}
    return Draft([message], questions)


TASKS = (
    Task("text to JSON", records, output=64, score=score_record),
    Task("entry of a manual", manual, output=24),
)
