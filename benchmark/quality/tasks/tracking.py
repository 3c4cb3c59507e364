"""Variable tracking (RULER, section 3.2): which variables have a value, through a chain of assignments."""

from __future__ import annotations

import string
from random import Random

from benchmark.quality.documents import Draft, Question, Task, report_with
from benchmark.quality.tasks.names import number

HOPS = 3
ABOUT = "Memorize and track the chains of variable assignments hidden in the following text."


def write(chance: Random, document: int, facts: int) -> Draft:
    chains = max(1, min(10, facts // (HOPS + 1)))
    taken: set[str] = set()
    lines: list[tuple[float, str]] = []
    questions = []
    for _ in range(chains):
        value, names = number(chance, 5), [_name(chance, taken) for _ in range(HOPS + 1)]
        places = sorted(chance.random() for _ in names)
        right = [value, *(f"VAR {name}" for name in names)]
        lines += [
            (place, f"VAR {name} = {source}") for place, name, source in zip(places, names, right[:-1], strict=True)
        ]
        questions.append(
            Question(
                f"Find all variables that are assigned the value {value} in the text above, directly or not.",
                f"There are {len(names)} variables that are assigned the value {value}, they are:",
                tuple(names),
            )
        )
    return Draft(report_with([line for _, line in sorted(lines)], ABOUT), questions)


def _name(chance: Random, taken: set[str]) -> str:
    while (name := "".join(chance.choices(string.ascii_uppercase, k=5))) in taken:
        continue
    taken.add(name)
    return name


TASKS = (Task("variable tracking", write, output=40),)
