"""Measures the time of one decode step of the whole model, and of the step's parts.

    python -m benchmark.serving.decode_step

For each batch size, all backends run at the same time, each on a server that sleeps while it is idle, and
take turns: every repeat runs all contexts on all backends, so that a slow minute of the machine affects all.
They serve the same requests, windows of a real text, whose prompts are in the prefix cache. A batch of requests is sent
twice, with a few output tokens and with many; the difference is the time of the additional steps. `to dense` and `to
shortest` are medians of ratios within one repeat: to the dense backend in the same case, and to the same backend
with the shortest context. The parts of a step, from the backend's own clock:

    attention   the attention kernel; for the dense backend also storing the new K and V
    prediction  waiting for the last step's transfer, storing K and V in the host pool, passing on the lookahead query
    transfer    new K and V to the resident tier, blocks that leave the local slots, summaries
    model       the time between the attention layers: projections and MLPs
    overhead    the rest of a step: embedding, logits, sampling, planning, scheduler

`background` is the time of the pipeline's stages, in its own thread during the step, or in the foreground if a waiting
layer ran them itself. Stock SGLang has no such clock. The parts are measured in the steps of the long run, so they may
not add up to the step exactly.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from matplotlib.figure import Figure
from transformers import AutoTokenizer

from benchmark import report
from sglang_oasis.reference_model import reference_model_path
from sglang_oasis.testing.corpus import real_text_tokens
from sglang_oasis.testing.server import Server, launch_server

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
PAGE = 16
MARGIN = 64
"""Tokens beyond the context that a request may take; the reference model's contexts end at 8192."""
WINDOW_DISTANCE = 997
"""Tokens between the starts of two prompts, so that they share no prefix."""


class Case(NamedTuple):
    """A case that one backend runs.

    Attributes:
        backend: name.
        batch: requests that decode.
        context: tokens of each request.
    """

    backend: str
    batch: int
    context: int


class Sample(NamedTuple):
    """One decode step, the mean of many; times in milliseconds.

    Attributes:
        wall: time of the step.
        parts: part -> time.
        background: time of the pipeline's stages.
        stalls: waits that found a transfer unfinished.
    """

    wall: float
    parts: dict[str, float]
    background: float
    stalls: float


@dataclass(frozen=True)
class Step:
    """One decode step of one backend, medians over the repeats; see `Case` and `Sample`.

    Attributes:
        to_dense: time relative to the dense backend's step.
        to_shortest: time relative to the same backend's step with the shortest context.
        walls: time of the step in each repeat.
    """

    backend: str
    batch: int
    context: int
    step: float
    to_dense: float | None
    to_shortest: float
    parts: dict[str, float]
    background: float
    stalls: float
    walls: list[float]


def cases_of(backend: str, options: argparse.Namespace) -> list[Case]:
    """Return the cases that a backend runs.

    A resident tier that holds all blocks is large, so that backend runs only small cases; stock SGLang is slow, and
    runs only the largest of these.
    """
    cases = [Case(backend, batch, context) for batch in options.batches for context in options.contexts]
    small = [case for case in cases if case.batch <= options.small[0] and case.context <= options.small[1]]
    if backend == "stock":
        return [max(small, key=lambda case: (case.batch, case.context))]
    return small if backend == "lookahead-all-resident" else cases


def flags_of(backend: str, cases: Sequence[Case], options: argparse.Namespace) -> Sequence[str]:
    batch, context = max(case.batch for case in cases), max(case.context for case in cases)
    # The longest prompts, which contain the others, and the output tokens of every case.
    generated = len(cases) * (FEW + options.steps + 2 * PAGE)
    tokens = max(case.batch * (case.context + 2 * PAGE + generated) for case in cases)
    common = (
        *("--dtype", options.dtype, "--kv-cache-dtype", "bfloat16", "--context-length", str(context + MARGIN)),
        *("--page-size", str(PAGE)),
        *("--max-total-tokens", str(tokens), "--max-running-requests", str(batch), "--sleep-on-idle"),
    )
    if backend == "stock":
        return (*common, "--attention-backend", "torch_native")
    if backend == "dense":
        return (*common, "--attention-backend", "oasis_cpu")
    budget = context + MARGIN if backend == "lookahead-all-resident" else options.budget
    return (*common, "--enable-lookahead-kv", "--lookahead-kv-budget-tokens", str(budget), *options.lookahead)


def generate(server: Server, prompts: Sequence[Sequence[int]], tokens: int) -> tuple[float, list[dict[str, Any]]]:
    """Return the seconds that the prompts take together, and the data about each answer."""
    start = time.perf_counter()
    response = server.post(
        "/generate",
        input_ids=list(prompts),
        sampling_params={"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True},
    )
    response.raise_for_status()
    return time.perf_counter() - start, [answer["meta_info"] for answer in response.json()]


def clocks(server: Server) -> dict[str, Any]:
    """Return the backend's clock and counters, empty for stock SGLang."""
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


def measure(server: Server, prompts: Sequence[Sequence[int]], steps: int) -> Sample:
    """Time the steps between FEW and FEW + steps output tokens."""
    short, _ = generate(server, prompts, FEW)
    before = clocks(server)
    long, _ = generate(server, prompts, FEW + steps)
    wall = 1e3 * (long - short) / steps
    after = clocks(server)
    taken = max(1, after["steps"] - before["steps"])
    parts = dict.fromkeys(PARTS, 0.0)
    for name, part in PART_OF.items():
        parts[part] += 1e3 * (after["parts"].get(name, 0) - before["parts"].get(name, 0)) / taken
    parts["overhead"] = wall - sum(parts.values())
    background = 1e3 * (after["background"] - before["background"]) / taken
    return Sample(wall, parts, background, (after["stalls"] - before["stalls"]) / taken)


def run(cases: Sequence[Case], text: Sequence[int], options: argparse.Namespace) -> dict[Case, list[Sample]]:
    """Measure the cases of one batch size, in turns."""
    samples: dict[Case, list[Sample]] = {case: [] for case in cases}
    backends = dict.fromkeys(case.backend for case in cases)
    with contextlib.ExitStack() as stack:
        servers = {}
        for backend in report.progress(list(backends), "servers"):
            flags = flags_of(backend, [case for case in cases if case.backend == backend], options)
            servers[backend] = stack.enter_context(launch_server(*flags))
        for case in report.progress(sorted(cases, key=lambda case: case.context), "prompts"):
            generate(servers[case.backend], prompts_of(case, text), FEW)
        for case in report.progress([*cases] * options.repeats, "steps"):
            samples[case].append(measure(servers[case.backend], prompts_of(case, text), options.steps))
    return samples


def prompts_of(case: Case, text: Sequence[int]) -> list[Sequence[int]]:
    """Return windows of the text that share no prefix; a window of a shorter context begins that of a longer one."""
    return [text[start : start + case.context] for start in range(0, case.batch * WINDOW_DISTANCE, WINDOW_DISTANCE)]


def summarise(samples: Mapping[Case, Sequence[Sample]]) -> list[Step]:
    def relative(case: Case, base: Case) -> float | None:
        if base not in samples:
            return None
        return statistics.median(a.wall / b.wall for a, b in zip(samples[case], samples[base], strict=True))

    steps = []
    for case, taken in samples.items():
        shortest = min(other.context for other in samples if other[:2] == case[:2])
        to_shortest = relative(case, case._replace(context=shortest))
        assert to_shortest is not None
        steps.append(
            Step(
                *case,
                statistics.median(sample.wall for sample in taken),
                relative(case, case._replace(backend="dense")),
                to_shortest,
                {part: statistics.median(sample.parts[part] for sample in taken) for part in PARTS},
                statistics.median(sample.background for sample in taken),
                statistics.median(sample.stalls for sample in taken),
                [sample.wall for sample in taken],
            )
        )
    return steps


def show(steps: Sequence[Step]) -> None:
    columns = (
        *("backend", "batch", "context", "step ms", "to dense", "to shortest"),
        *(*PARTS, "background", "stalls"),
    )
    report.show_table(
        "One decode step, milliseconds",
        columns,
        [
            (
                *(step.backend, str(step.batch), str(step.context), f"{step.step:.1f}"),
                *("-" if step.to_dense is None else f"{step.to_dense:.2f}", f"{step.to_shortest:.2f}"),
                *("-" if step.backend == "stock" else f"{step.parts[part]:.1f}" for part in PARTS),
                *(f"{step.background:.1f}", f"{step.stalls:.1f}"),
            )
            for step in steps
        ],
    )


def plot(steps: Sequence[Step]) -> Figure:
    """Draw one panel per batch size: step time against context length."""
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
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--small",
        nargs=2,
        type=int,
        metavar=("BATCH", "CONTEXT"),
        default=[8, 4096],
        help="largest case of stock and of lookahead-all-resident",
    )
    parser.add_argument("--lookahead", nargs="*", default=[], help="more flags for lookahead KV")
    parser.add_argument("--dtype", default="bfloat16", help="dtype of the computation, or auto; K and V are bfloat16")
    parser.add_argument("--name", default="decode_step")
    options = parser.parse_args()
    tokens = max(options.batches) * WINDOW_DISTANCE + max(options.contexts)
    text = real_text_tokens(AutoTokenizer.from_pretrained(reference_model_path()), tokens)
    cases = [case for backend in options.backends for case in cases_of(backend, options)]
    samples: dict[Case, list[Sample]] = {}
    for batch in options.batches:
        samples |= run([case for case in cases if case.batch == batch], text, options)
    steps = summarise(samples)
    show(steps)
    report.save(options.name, {"options": vars(options), "steps": [asdict(step) for step in steps]}, plot(steps))


if __name__ == "__main__":
    main()
