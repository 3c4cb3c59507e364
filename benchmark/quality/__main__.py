"""Whether sparse attention answers as dense attention does: any Hugging Face model, through real servers.

    python -m benchmark.quality                                            # the reference model, 4K and 8K, an hour
    python -m benchmark.quality --model FOLDER --contexts 32768 --budgets 2048
    python -m benchmark.quality --tasks needle "text to JSON" --items 20   # a small part

Each policy gets the same items as dense attention. Items are drawn from seeds and from this Python's documentation, so
with the same Python a number names the same item. Answers are greedy. `--work` keeps them; a second run asks only what
is missing.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import rich
from transformers import AutoTokenizer

from benchmark import report
from benchmark.quality.documents import FILLER_TOKENS, Author
from benchmark.quality.findings import cells, draw, show
from benchmark.quality.policies import DENSE, NAMED, Policy, dense, lookahead
from benchmark.quality.run import READINGS, Serving, Store, evaluate, key_of
from benchmark.quality.tasks import TASKS
from sglang_oasis.cache import writable_folder
from sglang_oasis.reference_model import reference_model_path
from sglang_oasis.testing.corpus import real_text_tokens

NEEDED_BYTES = 10**8
"""For answers."""


def filler(tokenizer: Any, files: Sequence[Path]) -> list[int]:
    """Tokens of the files, or of the Python language reference."""
    if not files:
        return real_text_tokens(tokenizer, FILLER_TOKENS)
    text = "\n\n".join(file.read_text(errors="replace") for file in files)
    return tokenizer.encode(text, add_special_tokens=False)


def policies(options: argparse.Namespace) -> list[Policy]:
    own = {name: tuple(given.split()) for name, given in (one.split("=", 1) for one in options.policy)}
    flags = {name: NAMED[name] for name in options.policies} | own
    return [dense(), *(lookahead(name, budget, flags[name]) for name in flags for budget in options.budgets)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="folder of a model with a chat template (default: the reference)")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS), metavar="TASK", help=", ".join(TASKS))
    parser.add_argument("--contexts", type=int, nargs="+", default=[4096, 8192], help="tokens, answer included")
    parser.add_argument("--budgets", type=int, nargs="+", default=[512, 1024], help="tokens")
    parser.add_argument("--policies", nargs="*", choices=NAMED, default=["lookahead"], help="besides dense attention")
    parser.add_argument("--policy", nargs="+", default=[], metavar="NAME=FLAGS", help="policies of your own")
    parser.add_argument("--readings", nargs="+", choices=READINGS, default=list(READINGS), help="of the question")
    parser.add_argument("--items", type=int, default=100, help="per task and context")
    parser.add_argument("--concurrency", type=int, default=4, help="documents at a time")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--filler", type=Path, nargs="+", default=[], help="texts (default: Python's reference)")
    parser.add_argument("--work", type=Path, help="folder for the answers (default: in the cache)")
    parser.add_argument("--name", default="quality", help="name of the files under benchmark/results")
    options = parser.parse_args()

    model = (options.model or reference_model_path()).resolve()
    tokenizer = AutoTokenizer.from_pretrained(model)
    author = Author(tokenizer, filler(tokenizer, options.filler))
    store = Store((options.work or writable_folder("quality", NEEDED_BYTES)) / f"{model.name}.jsonl")
    asked = [
        (item, reading)
        for context in options.contexts
        for name in options.tasks
        for item in author.items(TASKS[name], context, options.items)
        for reading in options.readings
    ]
    serving = Serving(model, options.dtype, options.concurrency)
    chosen = policies(options)
    for policy in chosen:
        evaluate(serving, tokenizer, policy, asked, store)

    keys = [key_of(policy, item, reading, options.dtype) for policy in chosen for item, reading in asked]
    answers = [answer for key in keys if (answer := store.get(key)) is not None]
    found = cells(answers)
    show(found)
    overall = [answer.score for answer in answers if answer.policy == DENSE]
    rich.print(f"dense attention: {100 * sum(overall) / len(overall):.1f} on the mean of {len(overall)} answers")
    record = {
        "model": model.name,
        "options": vars(options),
        "cells": [asdict(cell) | {"delta": cell.delta} for cell in found],
    }
    report.save(options.name, record, draw(found, model.name))


if __name__ == "__main__":
    main()
