"""The results of `benchmark.studies.agreement`: numbers, tables, a figure, and whether they confirm our claims."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from math import isnan, nan
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmark import report
from benchmark.studies.lookahead_sources import DUAL, EAGLE3, LAST_QUERY, ORACLE
from benchmark.studies.working_set import Smoothing

IDEAL = "ideal: true mass"
OFF = Smoothing()
SHORTLIST = (OFF, Smoothing(0.9, 2.0), Smoothing(0.9, 3.0))
SMOOTHINGS = (OFF, *(Smoothing(decay, escape) for decay in (0.8, 0.9) for escape in (2.0, 3.0, None)))
"""Smoothings measured at the first K; at the other K, only those of the short list."""
HOW = ("capped", "free")
"""Working sets with and without a limit on the blocks that a step may fetch."""
SAVING, LOSS = 3.0, 0.3
"""The factor of fetched blocks that smoothing should save, and the points of mass that it may lose."""
GAP, WORST_GAP = 1.0, 3.0
"""Points of mass by which a working set may be below the ideal, on average and in the worst layer."""


@dataclass(frozen=True)
class Setup:
    """The extent of the measurements.

    Attributes:
        texts: kinds of text, of `DECODED_TEXTS`.
        contexts: tokens of the texts, with what is decoded.
        windows: number of texts of each kind and context.
        steps: decoded tokens at the end of each text.
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
        sudden_blocks: number of blocks that matter suddenly, over all layers, KV heads and steps.
        k: blocks selected per KV head.
        source: source of the lookahead query, or `IDEAL`, which has no working set.
        smoothing: name of the smoothing.
        agreement: share of the predicted K blocks that the next query selects.
        mass: attention mass of the predicted and local blocks.
        token_hits: how often a guessed token was that of the text; None if no token is guessed.
        capped_mass, capped_fetched: mass of a working set that admits `fetch_cap` blocks a step, and the blocks that it
            fetches per KV head and step.
        capped_sudden: share of the suddenly important blocks that this working set holds in that step.
        capped_late: share of them that it holds in the next step.
        free_mass, free_fetched, free_sudden, free_late: the same without a cap.
    """

    text: str
    window: int
    context: int
    sudden_blocks: int
    k: int
    source: str
    smoothing: str
    agreement: list[float]
    mass: list[float]
    token_hits: float | None = None
    capped_mass: list[float] = field(default_factory=list)
    capped_fetched: float | None = None
    capped_sudden: float | None = None
    capped_late: float | None = None
    free_mass: list[float] = field(default_factory=list)
    free_fetched: float | None = None
    free_sudden: float | None = None
    free_late: float | None = None


class Effect(NamedTuple):
    """The effect of a smoothing.

    Attributes:
        mass: attention mass of the working set.
        points: difference of the mass to that without smoothing, in percentage points.
        fetched: blocks fetched per KV head and step.
        sudden, late: as in `Measurement`.
    """

    mass: float
    points: float
    fetched: float
    sudden: float
    late: float


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
        """Return a column of `Measurement`, per layer."""
        cells = self._by_cell[text, context, k, source, str(smoothing)]
        return [fmean(values) for values in zip(*(getattr(cell, column) for cell in cells), strict=True)]

    def mean(self, column: str, text: str, context: int, k: int, source: str, smoothing: Smoothing = OFF) -> float:
        """Return a column's mean over the layers, or of a column that is not per layer; NaN if no text has a number."""
        found = [getattr(cell, column) for cell in self._by_cell[text, context, k, source, str(smoothing)]]
        numbers = [fmean(value) if isinstance(value, list) else value for value in found if value is not None]
        return fmean(numbers) if numbers else nan

    def effect(self, how: str, text: str, context: int, k: int, source: str, smoothing: Smoothing) -> Effect:
        """Return the effect of a smoothing on a working set of the kind `how`, one of `HOW`."""
        columns = [f"{how}_{name}" for name in ("mass", "fetched", "sudden", "late")]
        mass, fetched, sudden, late = (self.mean(c, text, context, k, source, smoothing) for c in columns)
        return Effect(mass, 100 * (mass - self.mean(columns[0], text, context, k, source)), fetched, sudden, late)

    def points_below_ideal(self, text: str, context: int, k: int, source: str, smoothing: Smoothing) -> list[float]:
        """Return by how many points a capped working set's mass is below that of the K best blocks, per layer."""
        held = self.layers("capped_mass", text, context, k, source, smoothing)
        ideal = self.layers("mass", text, context, k, IDEAL)
        return [100 * (best - mass) for best, mass in zip(ideal, held, strict=True)]

    def cells(self) -> list[tuple[str, int]]:
        """Return every kind of text and context."""
        return list(product(self.setup.texts, self.setup.contexts))


def show_sources(findings: Findings) -> None:
    """Show a table per kind of text and context: all sources and K, without smoothing."""
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
    hits = findings.mean("token_hits", text, context, k, source)
    yield "-" if isnan(hits) else f"{hits:.2f}"
    columns = ("agreement", "mass", "capped_mass", "capped_fetched", "free_mass", "free_fetched")
    for column in columns if source != IDEAL else columns[:2]:
        mean = findings.mean(column, text, context, k, source)
        yield f"{mean:.2f}" if "fetched" in column else f"{mean:.4f}"
        if column in ("agreement", "mass", "capped_mass"):
            yield f"{min(findings.layers(column, text, context, k, source)):.3f}"


def show_smoothing(findings: Findings) -> None:
    """Show a table per source, with and without a cap, at the first K and the longest context."""
    k, context = findings.setup.blocks[0], max(findings.setup.contexts)
    columns = ["smoothing"]
    for text in findings.setup.texts:
        columns += [f"{text}\npoints @ blocks", "held at\nonce/late"]
    for source, how in product(findings.sources, HOW):
        rows = []
        for smoothing in SMOOTHINGS:
            row = [str(smoothing)]
            for text in findings.setup.texts:
                effect = findings.effect(how, text, context, k, source, smoothing)
                row += [f"{effect.points:+.2f} @ {effect.fetched:.2f}", f"{effect.sudden:.2f}/{effect.late:.2f}"]
            rows.append(row)
        title = (
            f"{source}, {how}, {context} tokens, K={k}: mass against no smoothing, blocks fetched, sudden blocks held"
        )
        report.show_table(title, columns, rows)


@dataclass(frozen=True)
class Claim:
    """A claim and its evidence.

    Attributes:
        claim: the claim in words.
        holds: whether it holds on every kind of text.
        evidence: the numbers, one line each.
    """

    claim: str
    holds: bool
    evidence: list[str]


def claims(findings: Findings) -> list[Claim]:
    """Return all claims, at the first K and the longest context."""
    k, context = findings.setup.blocks[0], max(findings.setup.contexts)
    drafting = [source for source in (DUAL, EAGLE3) if source in findings.sources]
    return [
        *(_beats_last_query(findings, context, k, source) for source in drafting),
        *(_smoothing_saves(findings, context, k, smoothing, how) for smoothing in SMOOTHINGS[1:] for how in HOW),
        *(_near_ideal(findings, context, k, source, s) for source in findings.sources for s in SHORTLIST),
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
        gaps = findings.points_below_ideal(text, context, k, source, smoothing)
        holds &= fmean(gaps) <= GAP and max(gaps) <= WORST_GAP
        evidence.append(f"{text} {fmean(gaps):.2f} points, worst layer {max(gaps):.2f} (layer {gaps.index(max(gaps))})")
    return Claim(
        f"{source}, smoothing {smoothing}, capped: within {GAP} point of the ideal, {WORST_GAP} in every layer",
        holds,
        evidence,
    )


def draw(findings: Findings) -> Figure:
    """Draw the figure, at the first K and the longest context, with a row per kind of text."""
    k, context = findings.setup.blocks[0], max(findings.setup.contexts)
    texts = findings.setup.texts
    figure = Figure(figsize=(15, 3.2 * len(texts)), layout="constrained")
    grid = figure.subplots(len(texts), 3, squeeze=False)
    for row, text in zip(grid, texts, strict=True):
        for source in (*findings.sources[:-1], IDEAL):
            row[0].plot(findings.layers("agreement", text, context, k, source), label=source)
        for source in findings.sources:
            row[1].plot(findings.points_below_ideal(text, context, k, source, OFF), label=source)
        _draw_smoothing(row[2], findings, text, context, k)
        row[0].set(title=f"{text}: agreement with the next query", xlabel="layer")
        row[1].set(title=f"{text}: points of mass below the ideal, capped", xlabel="layer")
        row[2].set(title=f"{text}: mass by traffic", xlabel="blocks fetched per KV head and step")
    for axes in grid[0]:
        axes.legend(fontsize="x-small")
    figure.suptitle(
        f"SmolLM2-135M-Instruct, {context} tokens, K={k} blocks of 16, {findings.setup.windows} texts of each kind, "
        f"{findings.setup.steps - 1} predicted steps each"
    )
    return figure


def _draw_smoothing(axes: Axes, findings: Findings, text: str, context: int, k: int) -> None:
    """Draw every smoothing as a point: filled without a cap, hollow with a cap."""
    for number, source in enumerate(findings.sources):
        for how, face in zip(HOW, ("none", f"C{number}"), strict=True):
            found = [findings.effect(how, text, context, k, source, s) for s in SMOOTHINGS]
            label = f"{source}, {how}"
            fetched, mass = [f.fetched for f in found], [f.mass for f in found]
            axes.scatter(fetched, mass, s=22, facecolors=face, edgecolors=f"C{number}", label=label)
