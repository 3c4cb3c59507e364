"""Whether sparse attention drifts away from dense attention over a long answer.

    python -m benchmark.quality.drift

Dense attention writes a long answer about a long document; sparse attention is made to write the same tokens (teacher
forcing), and both say in each step how likely they think each token of the vocabulary. Shown are the Kullback-Leibler
divergence of sparse from dense, and how often both find the same token most likely, against the step.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from transformers import AutoTokenizer

from benchmark import report
from benchmark.holes import HOLE
from benchmark.quality.documents import ASKED, FILLER_TOKENS, Author, Draft, Item, Question, Task
from benchmark.quality.forcing import forcing
from benchmark.quality.policies import NAMED, Policy, dense, lookahead
from benchmark.quality.run import Serving
from sglang_oasis.cache import writable_folder
from sglang_oasis.reference_model import reference_model_path
from sglang_oasis.testing.corpus import real_text_tokens
from sglang_oasis.testing.server import Server

ASK = "Explain step by step, in as much detail as you can, what the text above says, and give examples of your own."
NEEDED_BYTES = 10**10
"""For log-probabilities: a document takes as many as steps times vocabulary, of two bytes each."""
PARTS = 5
"""The answer is divided into so many parts, to compare its end with its beginning."""


@dataclass(frozen=True)
class Drift:
    """One policy, against dense attention.

    Attributes:
        policy, budget: how it attended.
        divergence: [steps], nats, mean over the documents.
        agreement: [steps], share of the documents where both find the same token most likely.
    """

    policy: str
    budget: int
    divergence: list[float]
    agreement: list[float]

    def parts(self, values: list[float]) -> list[float]:
        """Means over the parts of the answer."""
        return [float(part.mean()) for part in np.array_split(np.array(values), PARTS)]


def task(steps: int) -> Task:
    """Documents without facts in them, and one question each."""
    message = {"role": "user", "content": f"{HOLE}\n\n{ASKED}"}
    return Task("long answer", lambda chance, document, facts: Draft([message], [Question(ASK, "", ("",))]), steps)


def decode(server: Server, item: Item, file: Path, forced: list[int] | None = None) -> list[int]:
    """Tokens of the answer; the log-probabilities [steps, V] of each step go to the file."""
    fields = forcing(forced=forced or [], keep=str(file), steps=item.task.output)
    fields["sampling"]["ignore_eos"] = True
    answer = server.generate([*item.prefix, *item.question], max_new_tokens=item.task.output, **fields)
    return answer["output_ids"]


def compare(dense_file: Path, sparse_file: Path) -> tuple[np.ndarray, np.ndarray]:
    """KL divergence of sparse from dense in nats, and whether the most likely token is the same, [steps] each."""
    divergence, same = [], []
    for dense_row, sparse_row in zip(
        np.load(dense_file, mmap_mode="r"), np.load(sparse_file, mmap_mode="r"), strict=True
    ):
        left, right = dense_row.astype(np.float64), sparse_row.astype(np.float64)
        likely = np.isfinite(left) & np.isfinite(right)
        divergence.append(max(0.0, float(np.sum(np.exp(left[likely]) * (left - right)[likely]))))
        same.append(left.argmax() == right.argmax())
    return np.array(divergence), np.array(same, float)


def measure(serving: Serving, items: list[Item], chosen: list[Policy], work: Path) -> list[Drift]:
    work.mkdir(parents=True, exist_ok=True)
    context = max(item.context for item in items)
    files = {item.number: work / f"dense-{item.number}.npy" for item in items}
    tokens: dict[int, list[int]] = {}
    with serving.server(dense(), context) as server:
        for item in report.progress(items, "dense"):
            tokens[item.number] = decode(server, item, files[item.number])
    found = []
    for policy in chosen:
        results = []
        with serving.server(policy, context) as server:
            for item in report.progress(items, policy.label):
                file = work / "sparse.npy"
                decode(server, item, file, tokens[item.number])
                results.append(compare(files[item.number], file))
        divergence, agreement = (np.mean(values, axis=0).tolist() for values in zip(*results, strict=True))
        found.append(Drift(policy.name, policy.budget, divergence, agreement))
    return found


def draw(found: list[Drift], title: str) -> Figure:
    figure = Figure(figsize=(11, 4))
    left, right = figure.subplots(1, 2)
    for drift in found:
        label = f"{drift.policy} {drift.budget}"
        window = np.ones(50) / 50
        left.plot(np.convolve(drift.divergence, window, "valid"), label=label)
        right.plot(100 * np.convolve(drift.agreement, window, "valid"), label=label)
    left.set(xlabel="step", ylabel="KL divergence, nats", ylim=0)
    right.set(xlabel="step", ylabel="same most likely token, %", ylim=(None, 100))
    left.legend()
    figure.suptitle(f"{title}, means over 50 steps")
    return figure


def show(found: list[Drift]) -> None:
    rows = []
    for drift in found:
        name = f"{drift.policy} {drift.budget}"
        for what, values, scale in (("KL, nats", drift.divergence, 1), ("same token, %", drift.agreement, 100)):
            parts = [f"{scale * value:.3f}" for value in drift.parts(values)]
            rows.append((f"{name}: {what}", f"{scale * float(np.mean(values)):.3f}", *parts))
    parts = [f"part {part}" for part in range(1, PARTS + 1)]
    report.show_table("A long answer, teacher-forced", ("", "all", *parts), rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="folder of a model with a chat template (default: the reference)")
    parser.add_argument("--context", type=int, default=8192, help="tokens, answer included")
    parser.add_argument("--steps", type=int, default=1000, help="tokens of the answer")
    parser.add_argument("--budgets", type=int, nargs="+", default=[1024], help="tokens")
    parser.add_argument("--policies", nargs="+", choices=NAMED, default=["lookahead"])
    parser.add_argument("--documents", type=int, default=8)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--name", default="quality_drift", help="name of the files under benchmark/results")
    options = parser.parse_args()
    model = (options.model or reference_model_path()).resolve()
    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    author = Author(tokenizer, real_text_tokens(tokenizer, FILLER_TOKENS), options.steps + 64)
    items = author.items(task(options.steps), options.context, options.documents)
    serving = Serving(model, options.dtype, 1)
    chosen = [lookahead(name, budget, NAMED[name]) for name in options.policies for budget in options.budgets]
    found = measure(serving, items, chosen, writable_folder("quality", NEEDED_BYTES) / f"drift-{model.name}")
    show(found)
    record = {"model": model.name, "options": vars(options), "drift": [asdict(drift) for drift in found]}
    report.save(options.name, record, draw(found, model.name))


if __name__ == "__main__":
    main()
