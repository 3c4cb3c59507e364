"""What answers say: scores of sparse attention against those of dense attention on the same items."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from matplotlib.figure import Figure

from benchmark import report
from benchmark.quality.policies import DENSE
from benchmark.quality.run import Answer

KNOWN = 0.3
"""A model whose dense attention scores less does not know the task; selection cannot be judged by it."""


@dataclass(frozen=True)
class Cell:
    """One policy against dense attention, on the items that both have answered.

    Attributes:
        policy, budget, task, context, reading: what was asked, of whom.
        items: how many.
        dense, sparse: mean scores.
        won, lost: items that the policy answered better, and worse.
        p: of a two-sided sign test on these.
    """

    policy: str
    budget: int
    task: str
    context: int
    reading: str
    items: int
    dense: float
    sparse: float
    won: int
    lost: int
    p: float

    @property
    def delta(self) -> float:
        """Points of 100."""
        return 100 * (self.sparse - self.dense)

    @property
    def known(self) -> bool:
        return self.dense > KNOWN


def sign_test(won: int, lost: int) -> float:
    """Return the two-sided p-value of so many wins and losses, were both equally likely."""
    tail = sum(math.comb(won + lost, k) for k in range(min(won, lost) + 1))
    return min(1.0, 2 * tail / 2 ** (won + lost))


def cells(answers: Sequence[Answer]) -> list[Cell]:
    """Worst first."""
    by_cell: dict[tuple[str, int, str, int, str], dict[int, float]] = defaultdict(dict)
    for answer in answers:
        *cell, number, _ = answer.key
        by_cell[tuple(cell)][number] = answer.score  # type: ignore[index]
    found = []
    for (policy, budget, task, context, reading), sparse in by_cell.items():
        dense = by_cell.get((DENSE, 0, task, context, reading), {})
        numbers = sorted(set(sparse) & set(dense))
        if policy == DENSE or not numbers:
            continue
        differences = [sparse[n] - dense[n] for n in numbers]
        won, lost = sum(d > 0 for d in differences), sum(d < 0 for d in differences)
        p = sign_test(won, lost)
        means = fmean(dense[n] for n in numbers), fmean(sparse[n] for n in numbers)
        found.append(Cell(policy, budget, task, context, reading, len(numbers), *means, won, lost, p))
    return sorted(found, key=lambda cell: cell.delta)


def show(found: Sequence[Cell]) -> None:
    rows = [
        (
            f"{cell.policy} {cell.budget}",
            *(cell.task, str(cell.context), cell.reading, str(cell.items)),
            *(f"{100 * cell.dense:.1f}", f"{100 * cell.sparse:.1f}", f"{cell.delta:+.1f}"),
            *(f"{cell.won}:{cell.lost}", f"{cell.p:.3f}", "" if cell.known else "not known"),
        )
        for cell in found
    ]
    columns = ("policy", "task", "context", "question", "items", "dense", "sparse", "delta", "won:lost", "p", "")
    report.show_table("Answers, worst task first", columns, rows)


def draw(found: Sequence[Cell], title: str) -> Figure:
    """Points lost per task, a panel per context and reading, a colour per policy and budget."""
    panels = sorted({(cell.context, cell.reading) for cell in found})
    tasks = list(dict.fromkeys(cell.task for cell in found))
    policies = sorted({(cell.policy, cell.budget) for cell in found})
    figure = Figure(figsize=(4.5 * len(panels) + 2, 0.45 * len(tasks) + 1.8))
    for place, (context, reading) in enumerate(panels, start=1):
        axes = figure.add_subplot(1, len(panels), place)
        height = 0.8 / len(policies)
        for index, (policy, budget) in enumerate(policies):
            by_task = {
                cell.task: cell.delta
                for cell in found
                if (cell.policy, cell.budget, cell.context, cell.reading) == (policy, budget, context, reading)
                and cell.known
            }
            bars = [tasks.index(task) + index * height - 0.4 + height / 2 for task in by_task]
            axes.barh(bars, list(by_task.values()), height, label=f"{policy} {budget}")
        axes.set_yticks(range(len(tasks)), tasks if place == 1 else [""] * len(tasks))
        axes.invert_yaxis()
        axes.axvline(0, color="black", linewidth=0.8)
        axes.axvspan(-2, 2, color="grey", alpha=0.15)
        axes.set(title=f"{context} tokens, question {reading}", xlabel="points against dense")
    figure.axes[0].legend(loc="lower left", fontsize="small")
    figure.suptitle(title)
    return figure
