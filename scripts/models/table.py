"""`python -m scripts.models.table`: writes docs/models.md from the results of `python -m scripts.models`."""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

from scripts.models.cases import CASES
from scripts.models.judging import TOLERANCE
from scripts.models.serving import BUDGET, NEW_TOKENS, PROMPTS, WAYS

REPOSITORY = Path(__file__).parents[2]
RESULTS = REPOSITORY / "benchmark" / "results" / "models.json"
PAGE = REPOSITORY / "docs" / "models.md"

INTRODUCTION = """# Models

Every decoder with multi-head, grouped-query or multi-query attention that SGLang can load should work. Tests show
which ones do: `scripts/models` makes a tiny random model of each kind with transformers, serves it in float32 in four
ways, and compares each answer with that of Hugging Face's own model.

- **stock**: SGLang's `torch_native` attention, without our backends.
- **dense**: `--attention-backend oasis_cpu`.
- **lookahead**: `--enable-lookahead-kv`, policy `fetch`, a budget of {budget} tokens; each step checks all invariants.
- **device**: the same as lookahead, on the path of a CUDA device (`SGLANG_OASIS_DEVICE_PATH=1`).

Each way answers two prompts with {tokens} greedy tokens: a prompt of {below} tokens, which fits the budget,
and one of {above} tokens, which does not fit and is prefilled in chunks.

- *equal*: the answer is the reference's, and the 20 likeliest tokens of every step have the reference's
  log-probabilities to within {tolerance} nats. Beyond the budget the reference is the Hugging Face model masked to the
  blocks that the server recorded. Those blocks are the top K by the reference's own queries and keys, and full
  attention would have differed by more than ten times the tolerance.
- *as stock*: stock SGLang's model differs from Hugging Face's by more than the tolerance, and ours differs in the
  same way.

```bash
python -m scripts.models --out benchmark/results/models.json   # {cases} models, 10 to 20 s each on two cores
python -m scripts.models.table                                 # this page
```

The page was made with SGLang {sglang}, transformers {transformers}, torch {torch}. The numbers are in
`benchmark/results/models.json`; `test/e2e/test_models.py` tests a model of each kind of code path.

"""


def main() -> None:
    results: dict[str, Any] = json.loads(RESULTS.read_text())
    header = ["model", "architecture", *WAYS]
    rows = [_row(name, results[name]) for name in CASES if "ways" in results.get(name, {})]
    lines = ["| " + " | ".join(cells) + " |" for cells in (header, ["---"] * len(header), *rows)]
    text = INTRODUCTION.format(
        budget=BUDGET,
        below=len(PROMPTS["below"]),
        above=len(PROMPTS["above"]),
        tokens=NEW_TOKENS,
        tolerance=TOLERANCE,
        cases=len(CASES),
        **{package: version(package) for package in ("sglang", "transformers", "torch")},
    )
    PAGE.write_text(text + "\n".join(lines) + "\n\n" + "\n".join(_notes(results)) + "\n")


def _row(name: str, result: dict[str, Any]) -> list[str]:
    found = result["ways"]
    return [name, f"`{result['architecture']}`", *(found[way]["status"] if way in found else "" for way in WAYS)]


def _notes(results: dict[str, Any]) -> list[str]:
    """The messages where a model did not answer, each once, and which cases have not been tried."""
    said: dict[str, list[str]] = {}
    for name in CASES:
        for way, found in results.get(name, {}).get("ways", {}).items():
            if "said" in found:
                said.setdefault(found["said"].partition(". ")[0].rstrip("."), []).append(f"{name} ({way})")
    notes = [
        "These are the messages where a model is *refused* or *failed*. Where *stock* fails too, the failure is in "
        "SGLang's model:",
        "",
    ]
    notes += [f"- {', '.join(where)}: {what}." for what, where in said.items()]
    if untried := [name for name in CASES if "ways" not in results.get(name, {})]:
        notes += ["", f"Not tried yet: {', '.join(untried)}. An empty cell is a way that has not been tried."]
    return notes


if __name__ == "__main__":
    main()
