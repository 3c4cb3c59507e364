"""Ways to attend, each a server: dense attention, and lookahead KV with a budget."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

DENSE = "dense"


@dataclass(frozen=True)
class Policy:
    """How a server attends.

    Attributes:
        name: as shown and stored.
        budget: selected tokens per layer and KV head; 0 for all.
        flags: of the server, besides the common ones.
    """

    name: str
    budget: int
    flags: tuple[str, ...]

    @property
    def label(self) -> str:
        return f"{self.name} {self.budget}" if self.budget else self.name


def dense() -> Policy:
    return Policy(DENSE, 0, ("--attention-backend", "oasis_cpu"))


def lookahead(name: str, budget: int, flags: Sequence[str] = ()) -> Policy:
    """Lookahead KV with its defaults, other than `flags`."""
    ours = ("--enable-lookahead-kv", "--lookahead-kv-budget-tokens", str(budget))
    return Policy(name, budget, (*ours, *flags))


NAMED: dict[str, tuple[str, ...]] = {
    "lookahead": (),
    "lookahead, fetch": ("--lookahead-kv-miss-policy", "fetch"),
    "quest": ("--lookahead-kv-selector", "minmax", "--lookahead-kv-summary-dtype", "bf16"),
}
"""Name -> flags besides the budget: the defaults; with the true query; bounds of pages in full precision
(Quest, arXiv 2406.10774)."""
