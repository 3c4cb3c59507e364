"""Measures the adaptive fetch cap on a link that slows down, and the cost of the audit.

    python -m benchmark.micro.control

Both use `benchmark/micro/stack.py`, in this process. The link: every fetch ratio decodes the same steps in three
phases, with the link free, throttled to a tenth of its measured rate, and free again. The first steps of a phase, in
which the cap adapts, count only where the table says so. The audit: blocks of steps with and without it
alternate, each starting from the same context; ratios compare neighbouring blocks.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import rich
import torch
from matplotlib.figure import Figure

from benchmark import report
from benchmark.micro.stack import BLOCK, Decoder, Model, Shape, Workload, lay_out
from sglang_oasis.config import DEFAULT_FETCH_RATIO
from sglang_oasis.kernels.cpu import native, overrides
from sglang_oasis.lookahead import audit
from sglang_oasis.lookahead.audit import Audit
from sglang_oasis.lookahead.fetch_cap import AdaptiveCap
from sglang_oasis.testing.throttle import throttle

RATIOS = (None, DEFAULT_FETCH_RATIO, 1.0)
"""Fetch ratios; None is the adaptive cap, which comes first, because it measures the link."""
PHASES = ("free", "throttled", "free again")
SLOWDOWN = 10
AUDIT_INTERVAL = 32
AUDIT_WARM_UP = 16
"""Steps before a block is timed, so that its audits fall well inside it."""
MOST_STALLED, MOST_AUDIT_COST = 0.05, 0.02


@dataclass(frozen=True)
class Setup:
    """The extent of the measurements.

    Attributes:
        shape: sizes of the model and the contexts.
        warm_up: steps before the first phase.
        phase: steps of each phase.
        finding_out: first steps of a phase, in which the cap may still change.
        pairs: pairs of blocks with and without the audit.
        block: steps of each block, a multiple of AUDIT_INTERVAL.
    """

    shape: Shape
    warm_up: int
    phase: int
    finding_out: int
    pairs: int
    block: int

    @property
    def steps(self) -> int:
        """Largest number of steps that a row decodes without a restart."""
        return max(self.warm_up + len(PHASES) * self.phase, AUDIT_WARM_UP + self.block)


class Sample(NamedTuple):
    """One decode step.

    Attributes:
        seconds: its time.
        cap: most blocks that each KV head might fetch in it.
        fetched, deferred: numbers of blocks, as in `PipelineStatistics`.
        stalled: seconds that layers waited.
        transferring: seconds of the transfer stage.
    """

    seconds: float
    cap: int
    fetched: int
    deferred: int
    stalled: float
    transferring: float


@dataclass(frozen=True)
class Phase:
    """The results of a fetch ratio in a phase, in the steady state unless stated otherwise.

    Attributes:
        ratio, phase: names of the fetch ratio and of the phase.
        cap: median of the cap in blocks.
        fetched: blocks per KV head and step.
        missing: blocks per KV head and step that were among the best and over the cap.
        link: bytes per second and thread while blocks were transferred.
        stalled: share of the time that layers waited.
        stalled_at_first: the same in the first steps of the phase.
        milliseconds: mean time of a step.
        to_free: time of a step relative to the first phase of the same ratio.
    """

    ratio: str
    phase: str
    cap: float
    fetched: float
    missing: float
    link: float
    stalled: float
    stalled_at_first: float
    milliseconds: float
    to_free: float


@dataclass(frozen=True)
class AuditCost:
    """The cost of an audit every AUDIT_INTERVAL steps.

    Attributes:
        ratios: time of a block with it relative to its neighbour without, per pair.
        milliseconds: time of a step without the audit, median over the blocks.
        wall, processor: medians of the wall time and of the CPU time of an audit, in seconds.
        audits: number of timed audits.
    """

    ratios: Sequence[float]
    milliseconds: float
    wall: float
    processor: float
    audits: int

    @property
    def cost(self) -> float:
        """Median cost as a share of a step."""
        return statistics.median(self.ratios) - 1

    @property
    def quartiles(self) -> tuple[float, float]:
        """Quartiles of the cost as a share of a step."""
        first, _, third = statistics.quantiles(self.ratios, n=4)
        return first - 1, third - 1

    @property
    def processor_share(self) -> float:
        """CPU time of one audit as a share of the time of AUDIT_INTERVAL steps."""
        return self.processor / (AUDIT_INTERVAL * self.milliseconds / 1e3)


class TimedAudit(Audit):
    """An audit that measures the time of its thread.

    Attributes:
        times: (wall seconds, CPU seconds) of each audit.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self.times: list[tuple[float, float]] = []

    def _run(self, looks: Sequence[Any]) -> None:
        wall, processor = time.perf_counter(), time.thread_time()
        super()._run(looks)
        self.times.append((time.perf_counter() - wall, time.thread_time() - processor))


def decode(decoder: Decoder, steps: int) -> list[Sample]:
    """Decode and time steps one by one."""
    engine, samples = decoder.engine, []
    selected = engine.tier.layers[0].selected
    before, start = engine.pipeline.statistics(), time.perf_counter()
    for _ in range(steps):
        decoder.step()
        after, end = engine.pipeline.statistics(), time.perf_counter()
        samples.append(
            Sample(
                end - start,
                engine.cap.blocks(selected),
                after.fetched - before.fetched,
                after.deferred - before.deferred,
                after.stall_seconds - before.stall_seconds,
                after.seconds["transfer"] - before.seconds["transfer"],
            )
        )
        before, start = after, end
    return samples


def through_phases(decoder: Decoder, setup: Setup, throttled: float | None) -> tuple[list[list[Sample]], float]:
    """Decode all phases; returns (samples of each phase, bytes per second of the throttled link).

    Args:
        decoder: whose pipeline is throttled.
        setup: how many steps.
        throttled: bytes per second of the throttled link, None for the measured rate by SLOWDOWN.
    """
    engine = decoder.engine
    decoder.begin()
    decode(decoder, setup.warm_up)
    phases = [decode(decoder, setup.phase)]
    if throttled is None:
        assert isinstance(engine.cap, AdaptiveCap)
        assert engine.cap.link_bytes_per_second is not None
        throttled = engine.cap.link_bytes_per_second / SLOWDOWN
    for rate in (throttled, 0.0):
        throttle(engine.pipeline, rate)
        phases.append(decode(decoder, setup.phase))
    return phases, throttled


def stalled_share(samples: Sequence[Sample]) -> float:
    return sum(sample.stalled for sample in samples) / sum(sample.seconds for sample in samples)


def summarise(setup: Setup, ratio: str, phases: Sequence[Sequence[Sample]]) -> list[Phase]:
    """Return the results of one fetch ratio in all phases."""
    shape = setup.shape
    heads = shape.layers * shape.kv_heads * shape.batch
    _, layout = lay_out(shape, setup.steps, None)
    summaries: list[Phase] = []
    for name, samples in zip(PHASES, phases, strict=True):
        steady = samples[setup.finding_out :]
        fetched = sum(sample.fetched for sample in steady)
        milliseconds = 1e3 * statistics.fmean(sample.seconds for sample in steady)
        summaries.append(
            Phase(
                ratio,
                name,
                statistics.median(sample.cap for sample in steady),
                fetched / heads / len(steady),
                sum(sample.deferred for sample in steady) / heads / len(steady),
                fetched * layout.chunk_bytes / sum(sample.transferring for sample in steady),
                stalled_share(steady),
                stalled_share(samples[: setup.finding_out]),
                milliseconds,
                milliseconds / summaries[0].milliseconds if summaries else 1.0,
            )
        )
    return summaries


def steps_to_recover(phases: Sequence[Sequence[Sample]], cap: float) -> int | None:
    """Return the number of steps of the last phase until the cap is `cap` again, None if it never is."""
    return next((step for step, sample in enumerate(phases[-1], start=1) if sample.cap >= cap), None)


def measure_link(setup: Setup, model: Model, workload: Workload) -> tuple[dict[str, list[list[Sample]]], float]:
    """Return (ratio -> samples of its phases, bytes per second of the throttled link)."""
    throttled: float | None = None
    samples = {}
    for ratio in report.progress(RATIOS, "fetch ratios"):
        decoder = Decoder(setup.shape, model, workload, *lay_out(setup.shape, setup.steps, ratio))
        name = "auto" if ratio is None else f"{ratio:g}"
        samples[name], throttled = through_phases(decoder, setup, throttled)
        decoder.close()
    assert throttled is not None
    return samples, throttled


def measure_audit(setup: Setup, model: Model, workload: Workload) -> AuditCost:
    """Time pairs of blocks with and without the audit; the order within a pair alternates."""
    decoder = Decoder(setup.shape, model, workload, *lay_out(setup.shape, setup.steps, DEFAULT_FETCH_RATIO))
    ratios, plain, times = [], [], []
    for pair in report.progress(range(setup.pairs), "pairs of blocks with and without audit"):
        seconds = {}
        for audited in (True, False) if pair % 2 else (False, True):
            seconds[audited], found = time_block(decoder, workload, setup, audited)
            times += found
        ratios.append(seconds[True] / seconds[False])
        plain.append(seconds[False])
    decoder.close()
    wall, processor = (statistics.median(column) for column in zip(*times, strict=True))
    return AuditCost(ratios, 1e3 * statistics.median(plain) / setup.block, wall, processor, len(times))


def time_block(
    decoder: Decoder, workload: Workload, setup: Setup, audited: bool
) -> tuple[float, list[tuple[float, float]]]:
    """Return (seconds of a block of steps, times of its audits)."""
    watching = TimedAudit(decoder.engine.tier, workload.host, AUDIT_INTERVAL, workload.pages_of) if audited else None
    decoder.begin()
    decoder.engine.audit = watching
    decode(decoder, AUDIT_WARM_UP)
    seconds = sum(sample.seconds for sample in decode(decoder, setup.block))
    decoder.engine.audit = None
    if watching is None:
        return seconds, []
    watching.close()
    return seconds, watching.times


def judge(phases: Sequence[Phase], cost: AuditCost) -> dict[str, bool]:
    """Return our claims about the cap and the audit, and whether each of them holds."""
    free, throttled, again = (phase for phase in phases if phase.ratio == "auto")
    return {
        f"auto: stalls below {MOST_STALLED:.0%} of a step on a tenth of the link": throttled.stalled < MOST_STALLED,
        "auto: the cap shrinks on a tenth of the link": throttled.cap < free.cap,
        "auto: the cap recovers": again.cap > max(throttled.cap, free.cap / 2),
        f"audit every {AUDIT_INTERVAL} steps: at most {MOST_AUDIT_COST:.0%}": cost.cost <= MOST_AUDIT_COST,
    }


def show(setup: Setup, phases: Sequence[Phase], cost: AuditCost, claims: Mapping[str, bool]) -> None:
    shape = setup.shape
    columns = ("ratio, link", "cap", "fetched", "missing", "link MB/s", "stalled", "at first", "step ms", "to free")
    report.show_table(
        f"Fetch ratios on a link that slows down: batch {shape.batch}, {shape.context} tokens, budget {shape.budget}",
        columns,
        [
            (
                *(f"{p.ratio}, {p.phase}", f"{p.cap:.0f}", f"{p.fetched:.2f}", f"{p.missing:.2f}"),
                *(f"{p.link / 1e6:.0f}", f"{p.stalled:.1%}", f"{p.stalled_at_first:.1%}"),
                *(f"{p.milliseconds:.1f}", f"{p.to_free:.2f}"),
            )
            for p in phases
        ],
    )
    first, third = cost.quartiles
    rich.print(
        f"An audit every {AUDIT_INTERVAL} steps costs {cost.cost:+.1%} of a step of {cost.milliseconds:.1f} ms "
        f"(quartiles {first:+.1%} to {third:+.1%}, {len(cost.ratios)} pairs of {setup.block} steps). One takes "
        f"{1e3 * cost.wall:.1f} ms in its thread, {1e3 * cost.processor:.1f} ms of a processor, which is "
        f"{cost.processor_share:.2%} of the time between two (medians of {cost.audits})."
    )
    for claim, holds in claims.items():
        rich.print(f"{'holds' if holds else 'FAILS'}: {claim}")


def draw(setup: Setup, samples: Mapping[str, Sequence[Sequence[Sample]]], cost: AuditCost) -> Figure:
    """Draw cap, waiting time and missing blocks against steps, and the ratios of the audit's pairs."""
    shape = setup.shape
    heads = shape.layers * shape.kv_heads * shape.batch
    figure = Figure(figsize=(9, 9), layout="constrained")
    caps, stalls, missing, audits = figure.subplots(4, 1)
    for name, phases in samples.items():
        run = list(itertools.chain(*phases))
        caps.plot([sample.cap for sample in run], label=name)
        stalls.plot([100 * sample.stalled / sample.seconds for sample in run], label=name)
        missing.plot([sample.deferred / heads for sample in run], label=name)
    for axes, label in ((caps, "cap, blocks"), (stalls, "waiting, % of step"), (missing, "left out, per head")):
        axes.axvspan(setup.phase, 2 * setup.phase, color="0.9")
        axes.set(ylabel=label, yscale="symlog", ylim=(0, None))
    caps.legend(title="fetch ratio", ncols=len(samples))
    missing.set_xlabel(f"step (grey: the link has a tenth of its rate; K = {shape.budget // BLOCK})")
    audits.plot(sorted(100 * (ratio - 1) for ratio in cost.ratios), "o")
    audits.axhline(100 * MOST_AUDIT_COST, color="black", linestyle="--", linewidth=1)
    audits.set(xlabel="pairs of blocks, sorted (dashed: the most that we allow)", ylabel="audit's cost, % of step")
    return figure


def measure(setup: Setup) -> tuple[dict[str, Any], Figure]:
    """Run both measurements; returns the record and the figure."""
    torch.manual_seed(0)
    _, layout = lay_out(setup.shape, setup.steps, None)
    model, workload = Model(setup.shape), Workload(setup.shape, setup.steps, layout)
    samples, throttled = measure_link(setup, model, workload)
    phases = [phase for name, taken in samples.items() for phase in summarise(setup, name, taken)]
    cost = measure_audit(setup, model, workload)
    claims = judge(phases, cost)
    show(setup, phases, cost, claims)
    audited = {**asdict(cost), "cost": cost.cost, "quartiles": cost.quartiles, "processor_share": cost.processor_share}
    record = {
        "setup": asdict(setup),
        "throttled_to_bytes_per_second": throttled,
        "phases": [asdict(phase) for phase in phases],
        "steps_to_recover": steps_to_recover(samples["auto"], phases[0].cap),
        "audit": audited,
        "claims": claims,
    }
    return record, draw(setup, samples, cost)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--phase", type=int, default=150, help="steps of each phase (default: 150)")
    parser.add_argument("--pairs", type=int, default=16, help="pairs of blocks with and without audit (default: 16)")
    options = parser.parse_args()
    if native.load() is None or not overrides.serves(Shape().head_dim):
        raise SystemExit("The CPU kernels are not available here: see the warning above.")
    # The audit would warn about low recall, which these contexts have just after a topic has changed.
    logging.getLogger(audit.__name__).setLevel(logging.ERROR)
    setup = Setup(Shape(), warm_up=30, phase=options.phase, finding_out=40, pairs=options.pairs, block=64)
    report.save("control", *measure(setup))


if __name__ == "__main__":
    main()
