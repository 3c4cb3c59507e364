"""Servers that take turns, so that a slow minute of the machine slows them all."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

from transformers import AutoTokenizer

from benchmark import report
from sglang_oasis.reference_model import reference_model_path
from sglang_oasis.testing.corpus import real_text_tokens
from sglang_oasis.testing.server import Server


class Texts:
    """Windows of a real text, each of them new to every prefix cache."""

    def __init__(self, tokens: int) -> None:
        self._tokens = real_text_tokens(AutoTokenizer.from_pretrained(reference_model_path()), tokens)
        self._next = 0

    def take(self, count: int) -> list[int]:
        window = self._tokens[self._next : self._next + count]
        assert len(window) == count, "the text is used up"
        self._next += count
        return window


def seconds_to_answer(server: Server, prompt: list[int], output: int) -> float:
    start = time.perf_counter()
    server.generate(prompt, max_new_tokens=output, sampling={"ignore_eos": True})
    return time.perf_counter() - start


def compared(turns: int, ways: Mapping[str, Callable[[], float]], description: str) -> dict[str, Any]:
    """Samples of ways that take turns; medians, and how much longer each takes than the first way in the same turn.

    Every second turn goes through the ways backwards, so that none of them always comes second.
    """
    samples: dict[str, list[float]] = {name: [] for name in ways}
    for turn in report.progress(range(turns), description):
        for name, measure in list(ways.items())[:: -1 if turn % 2 else 1]:
            samples[name].append(measure())
    first, *_ = samples.values()
    return {
        name: {
            "seconds": statistics.median(found),
            "factor": statistics.median(mine / base for mine, base in zip(found, first, strict=True)),
            "samples": found,
        }
        for name, found in samples.items()
    }
