"""What `benchmark.agreement` finds: its numbers, the tables and the figure of them, and what they say about our claims."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmark import report
from benchmark.lookahead_sources import DUAL, EAGLE3, LAST_QUERY, ORACLE
from benchmark.working_set import Smoothing

IDEAL = "ideal: true mass"
OFF = Smoothing()
CHOSEN = Smoothing(0.8, 2.0)
SMOOTHINGS = (OFF, *(Smoothing(decay, escape) for decay in (0.8, 0.9) for escape in (2.0, 3.0, None)))
"""Measured at the first K; at the others, only off and the chosen one."""
HOW = ("capped", "free")
"""With and without a limit on what a step may fetch."""
SAVING, LOSS = 3.0, 0.3
"""What smoothing should save, as a ratio of blocks fetched, and may lose, in points of mass."""
GAP, WORST_GAP = 1.0, 3.0
"""Points of mass that a working set may be below the ideal, in the mean and in the worst layer."""


@dataclass(frozen=True)
class Setup:
    """What is measured.

    Attributes:
        texts: kinds of text, of `DECODED_TEXTS`.
        contexts: tokens of the texts, with what is decoded.
        windows: different texts of each kind and context.
        steps: decoded tokens at the end of each.
        blocks: values of K.
        head: folder of an EAGLE-3 head.
    """

    texts: tuple[str, ...]
    contexts: tuple[int, ...]
    windows: int
    steps: int
    blocks: tuple[int, ...]
    head: Path | None


@dataclass(frozen=True)
class Measurement:
    """One source, K and smoothing on one text; lists have an entry per layer, means over steps and KV heads.

    Attributes:
        text, window, context: kind of text, its number, tokens.
        k: blocks selected per KV head.
        source: of the lookahead query, or `IDEAL`.
        smoothing: as shown.
        token_hits: how often a guessed token was the text's; None where none is guessed.
        agreement: share of the predicted K blocks that the next query selects.
        mass: of the predicted and local blocks.
        capped_mass, capped_fetched: of a working set that admits `fetch_cap` blocks a step, and blocks it fetches per KV
            head and step.
        free_mass, free_fetched: the same without a cap.
    """

    text: str
    window: int
    context: int
    k: int
    source: str
    smoothing: str
    token_hits: float | None
    agreement: list[float]
    mass: list[float]
    capped_mass: list[float]
    capped_fetched: list[float]
    free_mass: list[float]
    free_fetched: list[float]


class Effect(NamedTuple):
    """What a smoothing does.

    Attributes:
        mass: of the working set.
        points: how much that is above no smoothing, in points.
        fetched: blocks per KV head and step.
    """

    mass: float
    points: float
    fetched: float


class Findings:
    """Means over the texts of a kind.

    Args:
        setup: what was measured.
        measurements: what was found.
    """

    def __init__(self, setup: Setup, measurements: Sequence[Measurement]) -> None:
        self.setup = setup
        self._by_cell: dict[tuple[str, int, int, str, str], list[Measurement]] = {}
        for m in measurements:
            self._by_cell.setdefault((m.text, m.context, m.k, m.source, m.smoothing), []).append(m)
        self.sources = [LAST_QUERY, DUAL, *([EAGLE3] if setup.head else []), ORACLE]

    def layers(
        self, column: str, text: str, context: int, k: int, source: str, smoothing: Smoothing = OFF
    ) -> list[float]:
        """A column of `Measurement`, per layer."""
        cells = self._by_cell[text, context, k, source, str(smoothing)]
        return [fmean(values) for values in zip(*(getattr(cell, column) for cell in cells), strict=True)]

    def mean(self, column: str, text: str, context: int, k: int, source: str, smoothing: Smoothing = OFF) -> float:
        """Its mean over the layers."""
        return fmean(self.layers(column, text, context, k, source, smoothing))

    def token_hits(self, text: str, context: int, k: int, source: str) -> float | None:
        hits = [m.token_hits for m in self._by_cell[text, context, k, source, str(OFF)]]
        return fmean(h for h in hits if h is not None) if hits[0] is not None else None

    def effect(self, how: str, text: str, context: int, k: int, source: str, smoothing: Smoothing) -> Effect:
        """What a smoothing does to a working set that is `how`, see `HOW`."""
        mass = self.mean(f"{how}_mass", text, context, k, source, smoothing)
        before = self.mean(f"{how}_mass", text, context, k, source)
        return Effect(mass, 100 * (mass - before), self.mean(f"{how}_fetched", text, context, k, source, smoothing))

    def cells(self) -> list[tuple[str, int]]:
        """Every kind of text and context."""
        return list(product(self.setup.texts, self.setup.contexts))


def show_sources(findings: Findings) -> None:
    """A table per kind of text and context: all sources and K, without smoothing."""
    columns = [
        "K", "source", "token\nright", "agree-\nment", "worst\nlayer", "mass", "worst\nlayer",
        "mass\ncapped", "worst\nlayer", "fetched\ncapped", "mass\nfree", "fetched\nfree",
    ]  # fmt: skip
    for text, context in findings.cells():
        rows = [
            [str(k), source, *_source_row(findings, text, context, k, source)]
            for k in findings.setup.blocks
            for source in (*findings.sources, IDEAL)
        ]
        report.show_table(f"{text}, {context} tokens, no smoothing", columns, rows)


def _source_row(findings: Findings, text: str, context: int, k: int, source: str) -> Iterator[str]:
    hits = findings.token_hits(text, context, k, source)
    yield "-" if hits is None else f"{hits:.2f}"
    columns = ("agreement", "mass", "capped_mass", "capped_fetched", "free_mass", "free_fetched")
    for column in columns if source != IDEAL else columns[:2]:
        layers = findings.layers(column, text, context, k, source)
        yield f"{fmean(layers):.2f}" if "fetched" in column else f"{fmean(layers):.4f}"
        if column in ("agreement", "mass", "capped_mass"):
            yield f"{min(layers):.3f}"


def show_smoothing(findings: Findings) -> None:
    """A table per context and source: mass lost against no smoothing, in points, and blocks fetched, at the first K."""
    k = findings.setup.blocks[0]
    columns = ["smoothing", *(f"{text}\n{how}" for text in findings.setup.texts for how in ("capped", "free"))]
    for context, source in product(findings.setup.contexts, findings.sources):
        rows = []
        for smoothing in SMOOTHINGS:
            effects = [
                findings.effect(how, text, context, k, source, smoothing)
                for text in findings.setup.texts
                for how in ("capped", "free")
            ]
            rows.append([str(smoothing), *(f"{effect.points:+.2f} @ {effect.fetched:.2f}" for effect in effects)])
        report.show_table(f"{source}, {context} tokens, K={k}: points of mass @ blocks fetched", columns, rows)


@dataclass(frozen=True)
class Claim:
    """A claim and what was measured.

    Attributes:
        claim: in words.
        holds: on every kind of text.
        evidence: the numbers, a line each.
    """

    claim: str
    holds: bool
    evidence: list[str]


def claims(findings: Findings) -> list[Claim]:
    """All claims, at the first K and the longest context."""
    k, context = findings.setup.blocks[0], max(findings.setup.contexts)
    drafting = [source for source in (DUAL, EAGLE3) if source in findings.sources]
    return [
        *(_beats_last_query(findings, context, k, source) for source in drafting),
        *(_smoothing_saves(findings, context, k, smoothing, how) for smoothing in SMOOTHINGS[1:] for how in HOW),
        *(_near_ideal(findings, context, k, source, s) for source in findings.sources for s in (OFF, CHOSEN)),
    ]


def _beats_last_query(findings: Findings, context: int, k: int, source: str) -> Claim:
    gains, evidence = [], []
    for text in findings.setup.texts:
        mass, fetched = (findings.mean(c, text, context, k, source) for c in ("capped_mass", "capped_fetched"))
        before, traffic = (findings.mean(c, text, context, k, LAST_QUERY) for c in ("capped_mass", "capped_fetched"))
        gains.append(100 * (mass - before))
        evidence.append(f"{text} {gains[-1]:+.2f} points, fetching {fetched:.2f} instead of {traffic:.2f} blocks")
    return Claim(f"{source} captures more mass than last-query at the same cap", min(gains) > 0, evidence)


def _smoothing_saves(findings: Findings, context: int, k: int, smoothing: Smoothing, how: str) -> Claim:
    holds, evidence = True, []
    for text in findings.setup.texts:
        before, after = (findings.effect(how, text, context, k, LAST_QUERY, s) for s in (OFF, smoothing))
        ratio = before.fetched / after.fetched
        holds &= ratio >= SAVING and after.points >= -LOSS
        evidence.append(f"{text} {ratio:.1f} times, {after.points:+.2f} points")
    return Claim(
        f"smoothing {smoothing}, {how}: fetches at most a third, loses at most {LOSS} points (last-query)",
        holds,
        evidence,
    )


def _near_ideal(findings: Findings, context: int, k: int, source: str, smoothing: Smoothing) -> Claim:
    holds, evidence = True, []
    for text in findings.setup.texts:
        mass = findings.layers("capped_mass", text, context, k, source, smoothing)
        ideal = findings.layers("mass", text, context, k, IDEAL)
        gaps = [100 * (best - held) for best, held in zip(ideal, mass, strict=True)]
        holds &= fmean(gaps) <= GAP and max(gaps) <= WORST_GAP
        evidence.append(f"{text} {fmean(gaps):.2f} points, worst layer {max(gaps):.2f} (layer {gaps.index(max(gaps))})")
    return Claim(
        f"{source}, smoothing {smoothing}, capped: within {GAP} point of the ideal, {WORST_GAP} in every layer",
        holds,
        evidence,
    )


def draw(findings: Findings) -> Figure:
    """At the first K and the longest context, a row per kind of text."""
    k, context = findings.setup.blocks[0], max(findings.setup.contexts)
    texts = findings.setup.texts
    figure = Figure(figsize=(15, 3.2 * len(texts)), layout="constrained")
    grid = figure.subplots(len(texts), 3, squeeze=False)
    for row, text in zip(grid, texts, strict=True):
        _draw_layers(row[0], findings, "agreement", text, context, k, [*findings.sources[:-1], IDEAL])
        _draw_layers(row[1], findings, "capped_mass", text, context, k, findings.sources)
        row[1].plot(findings.layers("mass", text, context, k, IDEAL), "k:", label=IDEAL)
        _draw_smoothing(row[2], findings, text, context, k)
        row[0].set(title=f"{text}: agreement with the next query", xlabel="layer")
        row[1].set(title=f"{text}: mass of the working set, capped", xlabel="layer")
        row[2].set(title=f"{text}: mass by traffic", xlabel="blocks fetched per KV head and step", xscale="log")
    for axes in grid[0]:
        axes.legend(fontsize="x-small")
    figure.suptitle(
        f"SmolLM2-135M-Instruct, {context} tokens, K={k} blocks of 16, {findings.setup.windows} texts of each kind, "
        f"{findings.setup.steps - 1} predicted steps each"
    )
    return figure


def _draw_layers(
    axes: Axes, findings: Findings, column: str, text: str, context: int, k: int, sources: Sequence[str]
) -> None:
    for source in sources:
        axes.plot(findings.layers(column, text, context, k, source), label=source)


def _draw_smoothing(axes: Axes, findings: Findings, text: str, context: int, k: int) -> None:
    """Every smoothing is a point: filled without a cap, hollow with."""
    for number, source in enumerate(findings.sources):
        for how, face in zip(HOW, ("none", f"C{number}"), strict=True):
            found = [findings.effect(how, text, context, k, source, s) for s in SMOOTHINGS]
            label = f"{source}, {how}"
            fetched, mass = [f.fetched for f in found], [f.mass for f in found]
            axes.scatter(fetched, mass, s=22, facecolors=face, edgecolors=f"C{number}", label=label)
