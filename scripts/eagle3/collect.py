"""Collects the text on which the head is trained.

    python -m scripts.eagle3.collect --out FOLDER

Chat: answers of the reference model itself, drawn by a server of this package at temperature 0 and 0.7. Prose and code:
the sources of the standard library, whose docstrings are English. Held out: subjects that no training prompt names, and
the language reference, whose text is not in the sources.
"""

from __future__ import annotations

import argparse
import json
import sysconfig
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from rich.progress import track
from transformers import AutoTokenizer

from scripts.eagle3.prompts import chat_prompts, question_tokens
from sglang_oasis.reference_model import reference_model_path
from sglang_oasis.testing.corpus import real_text_tokens
from sglang_oasis.testing.server import Server, launch_server

LENGTH = 512
"""Number of tokens of a training sequence."""
BATCH = 32


def answers(server: Server, tokenizer: Any, prompts: Sequence[str], tokens: int, note: str) -> Iterator[list[int]]:
    """Yield each prompt with its answer, as token ids."""

    def ask(numbered: tuple[int, str]) -> list[int]:
        number, prompt = numbered
        ids = question_tokens(tokenizer, prompt)
        temperature = 0.0 if number % 2 else 0.7
        response = server.generate(ids, max_new_tokens=tokens, sampling={"temperature": temperature})
        return ids + response["output_ids"]

    with ThreadPoolExecutor(BATCH) as pool:
        yield from track(pool.map(ask, enumerate(prompts)), note, total=len(prompts))


def library_text(tokenizer: Any, tokens: int) -> list[list[int]]:
    """Return windows of the standard library's sources, as token ids."""
    windows: list[list[int]] = []
    for file in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        ids = tokenizer.encode(file.read_text(errors="replace"))
        windows += [ids[start : start + LENGTH] for start in range(0, min(len(ids), 8 * LENGTH), LENGTH)]
    step = max(1, len(windows) * LENGTH // tokens)
    return windows[::step]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--prompts", type=int, default=1600)
    parser.add_argument("--answer-tokens", type=int, default=256)
    parser.add_argument("--library-tokens", type=int, default=150_000)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    tokenizer = AutoTokenizer.from_pretrained(reference_model_path())
    flags = (
        *("--attention-backend", "oasis_cpu", "--dtype", "bfloat16", "--context-length", "1024"),
        *("--max-running-requests", str(BATCH), "--max-total-tokens", str(BATCH * 640), "--random-seed", "1"),
    )
    with launch_server(*flags) as server:
        training, held_out = chat_prompts(False)[: options.prompts], chat_prompts(True)[:64]
        chat = list(answers(server, tokenizer, training, options.answer_tokens, "training"))
        held_out_chat = list(answers(server, tokenizer, held_out, options.answer_tokens, "held out"))
    prose = real_text_tokens(tokenizer, 16 * LENGTH)
    sets = {
        "train": chat + library_text(tokenizer, options.library_tokens),
        "held_out_chat": held_out_chat,
        "held_out_prose": [prose[start : start + LENGTH] for start in range(0, len(prose), LENGTH)],
    }
    for name, sequences in sets.items():
        kept = [ids[:LENGTH] for ids in sequences if len(ids) >= 16]
        (options.out / f"{name}.json").write_text(json.dumps(kept))
        print(f"{name}: {len(kept)} sequences, {sum(map(len, kept))} tokens")


if __name__ == "__main__":
    main()
