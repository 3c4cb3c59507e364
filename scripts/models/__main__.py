"""`python -m scripts.models`: tries every case in every way and writes the results.

python -m scripts.models --out benchmark/results/models.json
python -m scripts.models --only qwen3_moe gemma --ways lookahead
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

from scripts.models.cases import CASES, Case
from scripts.models.forking import ForkError, forked


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", default=list(CASES), choices=CASES, metavar="CASE")
    parser.add_argument("--ways", nargs="*", help="of: stock, dense, lookahead, device; all when left out")
    parser.add_argument("--out", type=Path, help="JSON file; keeps the results of cases that are not tried")
    parser.add_argument("--logs", type=Path, help="folder that keeps the logs of what failed")
    arguments = parser.parse_args()
    import_everything()
    from scripts.models.serving import WAYS

    results = json.loads(arguments.out.read_text()) if arguments.out and arguments.out.exists() else {}
    for name in arguments.only:
        begun = time.monotonic()
        found = try_case(CASES[name], arguments.ways or list(WAYS), arguments.logs)
        if name in results and "ways" in results[name] and "ways" in found:
            found["ways"] = {**results[name]["ways"], **found["ways"]}
        results[name] = found
        summary = {way: one["status"] for way, one in found.get("ways", {}).items()} or found
        print(f"{name}: {summary} ({time.monotonic() - begun:.0f} s)", flush=True)
        if arguments.out:
            ordered = {case: results[case] for case in CASES if case in results}
            arguments.out.write_text(json.dumps(ordered, indent=1) + "\n")


def import_everything() -> None:
    """Import what every engine and the reference need, so that forked processes have it already."""
    warnings.simplefilter("ignore")
    import torch

    import scripts.models.judging
    import scripts.models.weights  # noqa: F401

    torch.set_num_threads(1)  # threads of a pool do not survive a fork


def try_case(case: Case, ways: list[str], logs: Path | None = None) -> dict[str, Any]:
    """Make a case's model, serve it in these ways, compare each with the reference.

    Returns:
        `architecture` and, per way, a `status`: "equal", "as stock" (which differs from the reference), "different",
        "refused" or "failed", with what was measured or said. Only `error` where transformers cannot make the model.
    """
    from scripts.models.judging import difference_from_stock, is_as_stock, is_equal, judge
    from scripts.models.serving import WAYS, serve
    from scripts.models.weights import write_model

    with tempfile.TemporaryDirectory(prefix="oasis-model-") as name:
        folder = Path(name)
        try:
            made = forked(lambda: write_model(case, folder), folder / "made.log")
        except ForkError as error:
            _keep(folder / "made.log", logs, case)
            return {"error": str(error)}
        outcome: dict[str, Any] = {"architecture": made["architecture"], "ways": {}}
        stock = None
        for way in ways:
            log, trace = folder / f"{way}.log", folder / f"trace_{way}"
            try:
                answers = forked(lambda: serve(case, folder / "served", WAYS[way], trace), log)  # noqa: B023
                judged = folder / f"judged_{way}.log"
                verdict = forked(
                    lambda: judge(folder / "reference", answers, trace, WAYS[way].sparse),  # noqa: B023
                    judged,
                )
                found = {"status": "equal" if is_equal(verdict) else "different", **verdict}
                if way == "stock":
                    stock = answers
                elif stock is not None and found["status"] == "different":
                    found["from_stock"] = difference_from_stock(answers, stock, WAYS[way].sparse)
                    if outcome["ways"]["stock"]["status"] == "different":
                        found["status"] = "as stock" if is_as_stock(found, outcome["ways"]["stock"]) else "different"
            except ForkError as error:
                said = str(error).removeprefix("sglang_oasis.errors.LookaheadKVError: ")
                found = {"status": "failed" if said == str(error) else "refused", "said": said[:400]}
                _keep(log, logs, case)
            outcome["ways"][way] = found
        return outcome


def _keep(log: Path, logs: Path | None, case: Case) -> None:
    if logs is not None and log.exists():
        logs.mkdir(parents=True, exist_ok=True)
        shutil.copy(log, logs / f"{case.renamed or case.model_type}_{log.name}")


if __name__ == "__main__":
    main()
