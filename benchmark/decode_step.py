"""What one decode step of the whole model costs, and where the time goes.

    python -m benchmark.decode_step

Every backend serves the same requests: windows of a real text, whose prompts are in the prefix cache. A batch of
requests is sent twice, with a few output tokens and with many; the difference is the time of the steps in between. Its
parts, from the backend's own clock:

    attention   the attention kernel; for the dense backend also storing the new K and V
    prediction  waiting for the last step's transfer, storing K and V in the host pool, handing over the lookahead query
    transfer    new K and V to the resident tier, blocks that leave the local slots, summaries
    model       what passes between the attention layers: projections and MLPs
    overhead    the rest of a step: embedding, logits, sampling, planning, scheduler

`background` is the time of the pipeline's stages, in its own thread while all of this goes on, or in the foreground
where a waiting layer ran them itself. Stock SGLang has no such clock. The parts are of the steps of the long run, so
they need not add up to the step exactly.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from matplotlib.figure import Figure
from transformers import AutoTokenizer

from benchmark import report
from sglang_oasis.reference_model import reference_model_path
from test.e2e.server import Server, launch_server
from test.reference.corpus import real_text_tokens

PARTS = ("attention", "prediction", "transfer", "model", "overhead")
PART_OF = {
    "attention": "attention",
    "write_through": "prediction",
    "look_ahead": "prediction",
    "prepare": "transfer",
    "model": "model",
}
FEW = 8
"""Output tokens of the short run."""
MARGIN = 64
"""Tokens beyond the context that a request may take; the reference model's contexts end at 8192."""
WINDOW_DISTANCE = 997
"""Tokens between the starts of two prompts, so that they share no prefix."""


@dataclass(frozen=True)
class Step:
    """One decode step of one backend; times in milliseconds, medians over the repeats.

    Attributes:
        backend: name.
        batch: requests that decode.
        context: tokens of each.
        step: wall time.
        parts: part -> time.
        background: time of the pipeline's stages.
        stalls: waits that found a transfer unfinished.
    """

    backend: str
    batch: int
    context: int
    step: float
    parts: dict[str, float]
    background: float
    stalls: float


def cases_of(backend: str, options: argparse.Namespace) -> list[tuple[int, int]]:
    """(batch, context) that the backend runs.

    A resident tier of everything is large, so it gets the smaller ones, and stock SGLang, which is slow, the largest of
    these.
    """
    cases = [(batch, context) for batch in options.batches for context in options.contexts]
    few = [case for case in cases if case[0] * case[1] <= options.few_tokens]
    if backend == "stock":
        return [max(few, key=lambda case: (case[0] * case[1], case[1]))]
    return few if backend == "lookahead-all-resident" else cases


def flags_of(backend: str, cases: Sequence[tuple[int, int]], options: argparse.Namespace) -> Sequence[str]:
    batch, context = (max(sizes) for sizes in zip(*cases, strict=True))
    tokens = max(batch * (context + MARGIN + 16) for batch, context in cases)
    common = (
        *("--dtype", "bfloat16", "--context-length", str(context + MARGIN), "--page-size", "16"),
        *("--max-total-tokens", str(tokens), "--max-running-requests", str(batch)),
    )
    if backend == "stock":
        return (*common, "--attention-backend", "torch_native")
    if backend == "dense":
        return (*common, "--attention-backend", "oasis_cpu")
    budget = context + MARGIN if backend == "lookahead-all-resident" else options.budget
    return (*common, "--enable-lookahead-kv", "--lookahead-kv-budget-tokens", str(budget), *options.lookahead)


def generate(server: Server, prompts: Sequence[Sequence[int]], tokens: int) -> float:
    """Seconds that the prompts take together."""
    start = time.perf_counter()
    response = server.post(
        "/generate",
        input_ids=list(prompts),
        sampling_params={"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True},
    )
    response.raise_for_status()
    return time.perf_counter() - start


def clocks(server: Server) -> dict[str, Any]:
    """The backend's clock and counters, empty for stock SGLang."""
    state = server.get("/server_info").json()["internal_states"][0]
    if "lookahead_kv" in state:
        stats = state["lookahead_kv"]
        return {
            "steps": stats["counters"]["decode_steps"],
            "stalls": stats["counters"]["stalls"],
            "parts": stats["step_seconds"],
            "background": sum(stats["seconds"][stage] for stage in ("predict", "select", "transfer")),
        }
    stats = state.get("oasis_cpu", {"decode_steps": 0, "step_seconds": {}})
    return {"steps": stats["decode_steps"], "stalls": 0, "parts": stats["step_seconds"], "background": 0.0}


def measure(server: Server, backend: str, prompts: Sequence[Sequence[int]], options: argparse.Namespace) -> Step:
    """Time the steps between FEW and FEW + steps output tokens."""
    generate(server, prompts, FEW)  # what is not in the prefix cache yet
    walls, parts, background, stalls = [], [], [], []
    for _ in range(options.repeats):
        short = generate(server, prompts, FEW)
        before = clocks(server)
        walls.append(1e3 * (generate(server, prompts, FEW + options.steps) - short) / options.steps)
        after = clocks(server)
        steps = max(1, after["steps"] - before["steps"])
        sums = dict.fromkeys(PARTS, 0.0)
        for name, part in PART_OF.items():
            sums[part] += 1e3 * (after["parts"].get(name, 0) - before["parts"].get(name, 0)) / steps
        sums["overhead"] = walls[-1] - sum(sums.values())
        parts.append(sums)
        background.append(1e3 * (after["background"] - before["background"]) / steps)
        stalls.append((after["stalls"] - before["stalls"]) / steps)
    return Step(
        backend,
        len(prompts),
        len(prompts[0]),
        statistics.median(walls),
        {part: statistics.median(sums[part] for sums in parts) for part in PARTS},
        statistics.median(background),
        statistics.median(stalls),
    )


def run(backend: str, text: Sequence[int], options: argparse.Namespace) -> Iterable[Step]:
    """Every batch size and context length on one server."""
    cases = cases_of(backend, options)
    with launch_server(*flags_of(backend, cases, options)) as server:
        for batch, context in report.progress(cases, backend):
            starts = [i * WINDOW_DISTANCE for i in range(batch)]
            yield measure(server, backend, [list(text[start : start + context]) for start in starts], options)


def show(steps: Sequence[Step]) -> None:
    columns = ("backend", "batch", "context", "step ms", *PARTS, "background", "stalls")
    report.show_table(
        "One decode step, milliseconds",
        columns,
        [
            (
                *(step.backend, str(step.batch), str(step.context), f"{step.step:.1f}"),
                *("-" if step.backend == "stock" else f"{step.parts[part]:.1f}" for part in PARTS),
                *(f"{step.background:.1f}", f"{step.stalls:.1f}"),
            )
            for step in steps
        ],
    )


def plot(steps: Sequence[Step]) -> Figure:
    """One panel per batch size: step time against context length."""
    batches = sorted({step.batch for step in steps})
    figure = Figure(figsize=(4.5 * len(batches), 4))
    for axes, batch in zip(figure.subplots(1, len(batches), squeeze=False)[0], batches, strict=True):
        for backend in dict.fromkeys(step.backend for step in steps):
            mine = [step for step in steps if step.backend == backend and step.batch == batch]
            axes.plot([step.context for step in mine], [step.step for step in mine], marker="o", label=backend)
        axes.set(title=f"batch {batch}", xlabel="context, tokens", ylabel="decode step, ms", yscale="log")
        axes.legend()
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backends", nargs="+", default=["stock", "dense", "lookahead", "lookahead-all-resident"])
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--contexts", nargs="+", type=int, default=[1024, 2048, 4096, 8128])
    parser.add_argument("--budget", type=int, default=1024, help="budget of lookahead KV, tokens")
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--few-tokens",
        type=int,
        default=8 * 4096,
        help="largest batch * context of stock and of lookahead-all-resident",
    )
    parser.add_argument("--lookahead", nargs="*", default=[], help="more flags for lookahead KV")
    parser.add_argument("--name", default="decode_step")
    options = parser.parse_args()
    tokens = max(options.batches) * WINDOW_DISTANCE + max(options.contexts)
    text = real_text_tokens(AutoTokenizer.from_pretrained(reference_model_path()), tokens)
    steps = [step for backend in options.backends for step in run(backend, text, options)]
    show(steps)
    report.save(options.name, {"options": vars(options), "steps": [asdict(step) for step in steps]}, plot(steps))


if __name__ == "__main__":
    main()
