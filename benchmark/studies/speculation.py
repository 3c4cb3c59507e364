"""Measures the decode throughput of lookahead KV and speculation, alone and together.

    python -m benchmark.studies.speculation

Chat requests, each with a document of its own in front of a question that the EAGLE-3 head was not trained on, greedy.
All servers run at the same time, sleep while they are idle, and take turns, so that a slow minute of the
machine slows them all; factors are medians of ratios within one turn. The prompts are in the prefix cache. A batch is
sent twice, with a few output tokens and with many; the difference is the time of the additional steps.

NGRAM remembers the answers of earlier turns, which are the same, so its gain here is the largest possible.

"Same bytes": the device KV bytes that hold the full KV cache of R requests, as the dense backend's pool, and as the
resident tiers of lookahead KV, the draft model's included. Each server decodes as many requests concurrently as fit.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

from matplotlib.figure import Figure
from transformers import AutoTokenizer

from benchmark import report
from benchmark.serving.decode_step import FEW, generate
from benchmark.serving.throughput import kv_bytes_per_token
from scripts.eagle3.prompts import chat_prompts, question_tokens
from sglang_oasis.reference_model import reference_model_path
from sglang_oasis.testing.corpus import real_text_tokens
from sglang_oasis.testing.server import Server, launch_server

PAGE = 16
HEAD = Path(__file__).parents[2] / "assets" / "eagle3-smollm2-135m"
DRAFT_TOKENS = 5
"""Most tokens that a step may write beyond the end of a request."""


class Variant(NamedTuple):
    """One server configuration.

    Attributes:
        name: name in the table.
        lookahead: True for lookahead KV, False for the dense backend.
        flags: further flags.
    """

    name: str
    lookahead: bool
    flags: tuple[str, ...]


class Sample(NamedTuple):
    """The result of one turn.

    Attributes:
        throughput: output tokens per second.
        accept_length: tokens emitted per step and request.
    """

    throughput: float
    accept_length: float


@dataclass(frozen=True)
class Outcome:
    """The results of one server, medians over the turns.

    Attributes:
        variant: name of the variant.
        batch: requests that decode concurrently.
        throughput, accept_length: see `Sample`.
        to_plain: throughput relative to the same backend without speculation, None if that did not run.
        to_dense: throughput relative to the dense backend with the same speculation, None if that did not run.
        throughputs: throughput in each turn.
    """

    variant: str
    batch: int
    throughput: float
    accept_length: float
    to_plain: float | None
    to_dense: float | None
    throughputs: list[float]


def eagle3(steps: int) -> tuple[str, ...]:
    head = ("--speculative-draft-model-path", str(HEAD))
    return ("--speculative-algorithm", "EAGLE3", *head, "--speculative-num-steps", str(steps))


NGRAM = (
    *("--speculative-algorithm", "NGRAM", "--speculative-num-draft-tokens", "4"),
    *("--speculative-ngram-max-bfs-breadth", "1"),
)
SPECULATION: dict[str, tuple[str, ...]] = {"": (), "eagle3 1": eagle3(1), "eagle3 3": eagle3(3), "ngram": NGRAM}
ALONE: dict[str, tuple[str, ...]] = {
    "eagle3 1 rejected": (*eagle3(1), "--lookahead-kv-reject-drafts"),
    "dual": ("--lookahead-kv-source", "dual"),
    "audit every 32": ("--lookahead-kv-audit-interval", "32"),
}


def name_of(backend: str, speculation: str) -> str:
    return f"{backend} + {speculation}" if speculation else backend


def variants() -> list[Variant]:
    both = [
        Variant(name_of(backend, name), backend == "lookahead", flags)
        for backend in ("dense", "lookahead")
        for name, flags in SPECULATION.items()
    ]
    return both + [Variant(name_of("lookahead", name), True, flags) for name, flags in ALONE.items()]


def flags_of(variant: Variant, options: argparse.Namespace) -> tuple[str, ...]:
    longest = options.context + FEW + options.steps + DRAFT_TOKENS + 2 * PAGE
    pages = -(-longest // PAGE) + 2
    dense_tokens = options.dense_requests * pages * PAGE
    common = ("--dtype", "bfloat16", "--context-length", str(longest), "--sleep-on-idle", *variant.flags)
    if not variant.lookahead:
        batch = ("--max-running-requests", str(options.dense_requests), "--max-total-tokens", str(dense_tokens))
        return (*common, "--attention-backend", "oasis_cpu", *batch)
    return (
        *(*common, "--enable-lookahead-kv", "--lookahead-kv-budget-tokens", str(options.budget)),
        *("--lookahead-kv-device-gb", f"{dense_tokens * kv_bytes_per_token() / 1e9:.6f}"),
        *("--max-total-tokens", str((options.requests + 2) * pages * PAGE)),
        *("--max-running-requests", str(options.requests)),
    )


def prompts(options: argparse.Namespace) -> list[list[int]]:
    """Return prompts of `context` tokens, each with a document and a question."""
    tokenizer = AutoTokenizer.from_pretrained(reference_model_path())
    questions = chat_prompts(held_out=True)[: options.requests]
    text = real_text_tokens(tokenizer, options.requests * options.context)
    found = []
    for i, question in enumerate(questions):
        document = tokenizer.decode(text[i * options.context : (i + 1) * options.context])
        ids = question_tokens(tokenizer, f"{document}\n\nForget the text above. {question}")
        if len(ids) < options.context:
            raise ValueError(f"a prompt must have {options.context} tokens, got {len(ids)}")
        found.append(ids[-options.context :])
    return found


def measure(server: Server, batch: Sequence[list[int]], steps: int) -> Sample:
    short, _ = generate(server, batch, FEW)
    long, answers = generate(server, batch, FEW + steps)
    emitted = sum(answer["completion_tokens"] - 1 for answer in answers)
    verified = sum(answer.get("spec_verify_ct", 0) for answer in answers)
    return Sample(len(batch) * steps / (long - short), emitted / verified if verified else 1.0)


def run(chosen: Sequence[Variant], options: argparse.Namespace) -> dict[str, tuple[int, list[Sample]]]:
    """Return for each variant the number of concurrent requests, and a sample per turn."""
    questions = prompts(options)
    batches, samples = {}, {}
    with contextlib.ExitStack() as stack:
        servers = {}
        for variant in report.progress(list(chosen), "servers"):
            server = servers[variant.name] = stack.enter_context(launch_server(*flags_of(variant, options)))
            rows = server.stats()["rows"]["capacity"] if variant.lookahead else options.dense_requests
            batches[variant.name] = questions[: min(rows, options.requests)]
            samples[variant.name] = list[Sample]()
            generate(server, batches[variant.name], FEW)  # puts the prompts into the prefix cache
        for name in report.progress([*servers] * options.turns, "turns"):
            samples[name].append(measure(servers[name], batches[name], options.steps))
    return {name: (len(batches[name]), taken) for name, taken in samples.items()}


def summarise(measured: dict[str, tuple[int, list[Sample]]]) -> list[Outcome]:
    def relative(name: str, base: str) -> float | None:
        if base not in measured:
            return None
        pairs = zip(measured[name][1], measured[base][1], strict=True)
        return statistics.median(a.throughput / b.throughput for a, b in pairs)

    outcomes = []
    for name, (batch, taken) in measured.items():
        backend, _, speculation = name.partition(" + ")
        outcomes.append(
            Outcome(
                variant=name,
                batch=batch,
                throughput=statistics.median(sample.throughput for sample in taken),
                accept_length=statistics.median(sample.accept_length for sample in taken),
                to_plain=relative(name, backend),
                to_dense=relative(name, name_of("dense", speculation)) if backend != "dense" else None,
                throughputs=[sample.throughput for sample in taken],
            )
        )
    return outcomes


def show(outcomes: Sequence[Outcome]) -> None:
    report.show_table(
        "Decode throughput at the same device KV bytes",
        ("server", "requests", "tok/s", "accept length", "x without", "x dense"),
        [
            (
                *(o.variant, str(o.batch), f"{o.throughput:.1f}", f"{o.accept_length:.2f}"),
                *("-" if factor is None else f"{factor:.2f}" for factor in (o.to_plain, o.to_dense)),
            )
            for o in outcomes
        ],
    )


def plot(outcomes: Sequence[Outcome]) -> Figure:
    figure = Figure(figsize=(8, 0.4 * len(outcomes) + 1.2))
    axes = figure.subplots()
    axes.barh([o.variant for o in outcomes], [o.throughput for o in outcomes])
    axes.invert_yaxis()
    axes.set(xlabel="decode throughput, tokens per second")
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = {variant.name: variant for variant in variants()}
    parser.add_argument("--variants", nargs="+", choices=known, default=list(known), help="some of the servers")
    parser.add_argument("--requests", type=int, default=8, help="most that lookahead KV decodes concurrently")
    parser.add_argument("--dense-requests", type=int, default=3, help="R, requests whose full KV the device bytes hold")
    parser.add_argument("--context", type=int, default=4096, help="tokens of each prompt")
    parser.add_argument("--budget", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=64, help="output tokens that are timed")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--name", default="speculation")
    options = parser.parse_args()
    outcomes = summarise(run([known[name] for name in options.variants], options))
    show(outcomes)
    report.save(options.name, {"options": vars(options), "outcomes": [asdict(o) for o in outcomes]}, plot(outcomes))


if __name__ == "__main__":
    main()
