"""Records the product's answers and selections, and compares two recordings, to show that a change has no effect.

    python -m scripts.recording record before/      # of one commit
    python -m scripts.recording record after/       # of another
    python -m scripts.recording compare before/ after/

The first layers of the reference model serve prompts of random tokens, in float32, one at a time, in each of several
configurations on the host's path and on the device's (by its references). A recording holds the tokens, their
log-probabilities, and of each decode step, layer and KV head the selected blocks, in the order of their slots.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoConfig

from scripts.eagle3.head import Head, HeadShape
from sglang_oasis.reference_model import truncated_model_path

LAYERS, DRAFT_VOCAB = 4, 512
PROMPT_TOKENS = (30, 190, 400, 701)
NEW_TOKENS = 70
COMMON: dict[str, Any] = {
    "enable_lookahead_kv": True,
    "lookahead_kv_budget_tokens": 192,
    "dtype": "float32",
    "context_length": 1024,
    "max_total_tokens": 2560,
    "max_running_requests": 4,
    "chunked_prefill_size": 256,
    "log_level": "error",
}
DROP = {"lookahead_kv_miss_policy": "drop", "lookahead_kv_fetch_ratio": 0.2}
FETCH = {"lookahead_kv_miss_policy": "fetch"}
BOUND = {"lookahead_kv_selector": "minmax", "lookahead_kv_summary_dtype": "bf16"}
NGRAM = {
    "speculative_algorithm": "NGRAM",
    "speculative_num_draft_tokens": 4,
    "speculative_ngram_max_bfs_breadth": 1,
}
EAGLE3 = {"speculative_algorithm": "EAGLE3", "speculative_num_steps": 3, "speculative_draft_model_path": "HEAD"}
DEVICE = {"SGLANG_OASIS_DEVICE_PATH": "1"}
CONFIGURATIONS: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
    "host, drop": (DROP, {}),
    "host, fetch": (FETCH, {}),
    "host, unsmoothed": ({**DROP, **BOUND, "lookahead_kv_smoothing": 0.0}, {}),
    "host, a dense layer": ({**DROP, "lookahead_kv_dense_layers": "1"}, {}),
    "host, ngram, drop": ({**DROP, **NGRAM}, {}),
    "host, ngram, fetch": ({**FETCH, **NGRAM}, {}),
    "host, dual": ({**DROP, "lookahead_kv_source": "dual"}, {}),
    "host, eagle3": ({**DROP, **EAGLE3}, {}),
    "device, drop": (DROP, DEVICE),
    "device, fetch": (FETCH, DEVICE),
    "device, ngram, drop": ({**DROP, **NGRAM}, DEVICE),
}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    actions = parser.add_subparsers(dest="action", required=True)
    record = actions.add_parser("record")
    record.add_argument("folder", type=Path)
    record.add_argument("--only", choices=CONFIGURATIONS)
    compare = actions.add_parser("compare")
    compare.add_argument("folders", type=Path, nargs=2)
    given = parser.parse_args(arguments)
    if given.action == "compare":
        sys.exit(0 if same(*given.folders) else 1)
    elif given.only is not None:
        record_one(given.only, given.folder)
    else:
        record_all(given.folder)


def record_all(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, (_, environment) in CONFIGURATIONS.items():
        if (folder / f"{name}.pt").exists():  # from an interrupted recording
            continue
        print(name, flush=True)
        command = [sys.executable, "-m", "scripts.recording", "record", str(folder), "--only", name]
        with tempfile.TemporaryDirectory() as trace:
            settings = {**environment, "SGLANG_OASIS_TRACE_DIR": trace, "SGLANG_OASIS_CHECK_INTEGRITY": "1"}
            subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1", **settings}, check=True)


def record_one(name: str, folder: Path) -> None:
    import sglang

    model = truncated_model_path(LAYERS)
    flags = {**COMMON, **CONFIGURATIONS[name][0], "model_path": str(model)}
    with tempfile.TemporaryDirectory() as head:
        if "speculative_draft_model_path" in flags:
            write_head(model, Path(head))
            flags["speculative_draft_model_path"] = head
        engine = sglang.Engine(**flags)
        answers = [answer(engine, number, tokens) for number, tokens in enumerate(PROMPT_TOKENS)]
        engine.shutdown()
    steps = [torch.load(file) for file in sorted(Path(os.environ["SGLANG_OASIS_TRACE_DIR"]).glob("**/step_*.pt"))]
    torch.save({"answers": answers, "steps": steps}, folder / f"{name}.pt")


def answer(engine: Any, number: int, tokens: int) -> dict[str, Any]:
    """Return tokens and log-probabilities for a prompt; a third of it is a repetition, so that NGRAM finds drafts."""
    prompt = torch.randint(100, 40_000, (tokens,), generator=torch.Generator().manual_seed(number)).tolist()
    prompt[tokens // 3 : 2 * (tokens // 3)] = prompt[: tokens // 3]
    sampling = {"max_new_tokens": NEW_TOKENS, "temperature": 0, "ignore_eos": True}
    given = engine.generate(input_ids=prompt, sampling_params=sampling, return_logprob=True, rid=f"recorded-{number}")
    logprobs = [logprob for logprob, *_ in given["meta_info"]["output_token_logprobs"]]
    return {"tokens": given["output_ids"], "logprobs": logprobs}


def write_head(model: Path, folder: Path) -> None:
    """Write an EAGLE-3 head with random weights; its drafts are nearly always wrong."""
    target = AutoConfig.from_pretrained(model)
    torch.manual_seed(0)
    head = Head(HeadShape.of(target, DRAFT_VOCAB, layers=(0, 1, 2)))
    save_file(head.checkpoint(torch.arange(DRAFT_VOCAB), target.vocab_size), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(head.config(target)))


def same(before: Path, after: Path) -> bool:
    """Whether both recordings hold the same; prints a line for each configuration."""
    equal = True
    for name in CONFIGURATIONS:
        old, new = (torch.load(folder / f"{name}.pt") for folder in (before, after))
        tokens = [answer["tokens"] for answer in old["answers"]] == [answer["tokens"] for answer in new["answers"]]
        gaps = [
            abs(a - b)
            for there, here in zip(old["answers"], new["answers"], strict=True)
            for a, b in zip(there["logprobs"], here["logprobs"], strict=False)
        ]
        differing = [
            number
            for number, (there, here) in enumerate(zip(old["steps"], new["steps"], strict=False))
            if any(not equal_values(there[field], here[field]) for field in there)
        ]
        length = len(old["steps"]) == len(new["steps"])
        fine = tokens and max(gaps) == 0 and not differing and length
        equal &= fine
        print(
            f"{name}: {'equal' if fine else 'DIFFERENT'}; {len(new['steps'])} steps traced, {len(differing)} differ; "
            f"tokens {'equal' if tokens else 'differ'}; log-probabilities differ by {max(gaps):.1e} at most"
        )
    return equal


def equal_values(there: Any, here: Any) -> bool:
    return torch.equal(there, here) if isinstance(there, torch.Tensor) else there == here


if __name__ == "__main__":
    main()
