"""Measures the accept length as SGLang counts it: tokens per step in a server's answers to held-out questions.

    python -m scripts.eagle3.accept_length --head assets/eagle3-smollm2-135m

Writes accept_length.json into the head's folder. The first token of an answer comes from prefill and does not count.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from scripts.eagle3.prompts import chat_prompts, question_tokens
from sglang_oasis.reference_model import reference_model_path
from sglang_oasis.testing.server import launch_server

BATCH = 16


def accept_length(head: Path, steps: int, prompts: Sequence[list[int]], tokens: int) -> dict[str, Any]:
    """Measure greedy answers in bfloat16 on the dense backend, with `steps` drafts per step."""
    flags = (
        *("--attention-backend", "oasis_cpu", "--dtype", "bfloat16", "--context-length", "1024"),
        *("--max-running-requests", str(BATCH), "--max-total-tokens", str(BATCH * 640)),
        *("--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", str(head)),
        *("--speculative-num-steps", str(steps)),
    )
    with launch_server(*flags) as server, ThreadPoolExecutor(BATCH) as pool:
        answers = list(pool.map(lambda ids: server.generate(ids, max_new_tokens=tokens)["meta_info"], prompts))
    emitted = sum(answer["completion_tokens"] - 1 for answer in answers)
    verified = sum(answer["spec_verify_ct"] for answer in answers)
    return {"drafts": steps, "tokens": emitted, "steps": verified, "accept_length": round(emitted / verified, 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--head", type=Path, required=True)
    parser.add_argument("--drafts", nargs="+", type=int, default=[1, 3])
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=128)
    options = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(reference_model_path())
    questions = chat_prompts(held_out=True)[: options.prompts]
    prompts = [question_tokens(tokenizer, question) for question in questions]
    found = [accept_length(options.head, drafts, prompts, options.tokens) for drafts in options.drafts]
    print(json.dumps(found, indent=1))
    record = {"prompts": options.prompts, "tokens": options.tokens, "held_out_chat": found}
    (options.head / "accept_length.json").write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
