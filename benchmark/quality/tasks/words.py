"""Aggregation (RULER, section 3.3): the most common words of a list, the most frequent made-up words of a text."""

from __future__ import annotations

import string
from collections import Counter
from itertools import product
from random import Random

from benchmark.holes import HOLE
from benchmark.quality.documents import ASKED, TOKENS_PER_FACT, Draft, Question, Task
from benchmark.quality.tasks.names import ADJECTIVES, NOUNS

COMMON, TIMES, RARE_TIMES = 10, 30, 3
TOKENS_PER_WORD = 6
"""Of a numbered list; a document that takes fewer is filled up with other text, in front."""


def _message(about: str, listed: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"{HOLE}\n{about}\n{listed}\n{ASKED}"}]


def common(chance: Random, document: int, facts: int) -> Draft:
    """Ten words occur thirty times each, others three times."""
    words = [*ADJECTIVES, *NOUNS]
    chance.shuffle(words)
    room = facts * TOKENS_PER_FACT // TOKENS_PER_WORD
    frequent = words[:COMMON]
    times = min(TIMES, room // (2 * COMMON))
    rare = words[COMMON : COMMON + max(0, room - times * COMMON) // RARE_TIMES]
    listed = frequent * times + rare * RARE_TIMES
    chance.shuffle(listed)
    text = " ".join(f"{place}. {word}" for place, word in enumerate(listed, start=1))
    question = Question(
        f"What are the {COMMON} most common words in the list above?",
        f"The {COMMON} words that appear most often in the list are:",
        tuple(frequent),
    )
    return Draft(_message("Below is a numbered list of words. Some appear more often than others.", text), [question])


def frequent(chance: Random, document: int, facts: int) -> Draft:
    """Made-up words by Zipf's law; the three most frequent are asked for."""
    syllables = [a + b for a, b in product(string.ascii_lowercase, "aeiou")]
    words = ["".join(chance.sample(syllables, 3)) for _ in range(60)]
    room = facts * TOKENS_PER_FACT // TOKENS_PER_WORD
    listed = chance.choices(words, [rank**-2.0 for rank in range(1, len(words) + 1)], k=room)
    most = Counter(listed).most_common(3)
    question = Question(
        "What are the three most frequently appearing coded words in the text above?",
        "The three most frequently appearing coded words are:",
        tuple(word for word, _ in most),
    )
    return Draft(
        _message("Read the following coded text and track the frequency of each word.", " ".join(listed)), [question]
    )


TASKS = (
    Task("common words", common, output=64),
    Task("frequent words", frequent, output=32),
)
