"""Online audit: measures, from the full keys in host memory, how much of what attention needs was resident.

A prediction cannot measure its own quality, but the host pool holds all keys. Every N steps, a thread that runs on idle
cores only examines one row in a few layers: which blocks have the most attention mass of the true query, and which
share of that mass the working set covered. Only one audit runs at a time; while it runs, no other begins.
"""

from __future__ import annotations

import contextlib
import logging
import os
import random
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sglang_oasis.lookahead.step import DecodeStep
from sglang_oasis.tier.host_pool import HostPool
from sglang_oasis.tier.resident_tier import ResidentTier
from sglang_oasis.tier.window import Window

logger = logging.getLogger(__name__)

LAYERS_PER_AUDIT = 2
POOR_MASS = 0.9
"""Attention mass below which a layer's working set causes a log message."""
MEMORY = 16
"""Number of audits over which a layer's running mean extends."""


class Recall(NamedTuple):
    """The result of one audit of one layer, as means over its KV heads.

    Attributes:
        agreement: share of the K blocks with the most attention mass that were resident.
        mass: share of the attention mass that resident and local blocks had.
    """

    agreement: float
    mass: float


def measure_recall(
    query: Tensor, keys: Tensor, length: int, resident: Tensor, first_local: int, scale: float
) -> Recall:
    """Compare a working set with full attention.

    Args:
        query: [H * G, D].
        keys: [blocks, H, B, D], all of the row's blocks.
        length: tokens of the row; keys after them are ignored.
        resident: [H, K] int, logical blocks that were selected.
        first_local: first block that was local; all later blocks were local, too.
        scale: softmax scale.
    """
    blocks, heads, size, dim = keys.shape
    vectors = keys.transpose(0, 1).reshape(heads, blocks * size, dim).float()
    scores = query.float().view(heads, -1, dim) @ vectors.transpose(1, 2) * scale
    scores[..., length:] = float("-inf")
    mass = scores.softmax(-1).unflatten(-1, (blocks, size)).sum(-1).mean(1)  # [H, blocks]
    chosen = resident.long()
    best = mass[:, :first_local].topk(chosen.shape[1], dim=-1).indices
    held = torch.zeros_like(mass, dtype=torch.bool).scatter_(1, chosen, True)
    agreement = held.gather(1, best).float().mean()
    held[:, first_local:] = True
    return Recall(float(agreement), float((mass * held).sum(-1).mean()))


@dataclass
class LayerRecall:
    """Running means of a layer's audits, in which newer audits weigh more.

    Attributes:
        agreement, mass: see `Recall`; None before the first audit.
        worst_mass: the lowest mass of any audit.
    """

    agreement: float | None = None
    mass: float | None = None
    worst_mass: float = 1.0

    def add(self, found: Recall) -> None:
        def mean(old: float | None, new: float) -> float:
            return new if old is None else old + (new - old) / MEMORY

        self.agreement, self.mass = mean(self.agreement, found.agreement), mean(self.mass, found.mass)
        self.worst_mass = min(self.worst_mass, found.mass)


class _Look(NamedTuple):
    """What to measure in one layer: the arguments of `measure_recall`, and the row that the pages belong to."""

    layer: int
    row: int
    generation: int
    window: Window
    query: Tensor
    resident: Tensor
    pages: Tensor
    scale: float


@dataclass
class Audit:
    """Audits a sampled row every `interval` steps.

    Attributes:
        tier, host: the tiers.
        interval: least steps between two audits.
        pages_of: (row, number of blocks) -> [blocks] int64 host pages of the row's first blocks, as they are now.
        layers: running means, per layer.
        audits: number of finished audits.
    """

    tier: ResidentTier
    host: HostPool
    interval: int
    pages_of: Callable[[int, int], Tensor]
    layers: list[LayerRecall] = field(init=False)
    audits: int = 0

    def __post_init__(self) -> None:
        self.layers = [LayerRecall() for _ in self.tier.layers]
        self._thread = ThreadPoolExecutor(1, "lookahead-audit", initializer=_take_what_is_left)
        self._running: Future[None] | None = None
        self._failures: set[type[Exception]] = set()
        self._random = random.Random(0)
        self._steps = 0
        self._step: DecodeStep | None = None
        self._entry = 0
        self._sampled: set[int] = set()
        self._looks: list[_Look] = []

    def begin(self, step: DecodeStep) -> None:
        """Choose the row and the layers to audit in a decode step that begins."""
        self._sampled, self._looks, self._step = set(), [], step
        self._steps += 1
        if self._steps % self.interval or self._busy():
            return
        sparse = sorted(self.tier.layout.sparse_layers)
        if not sparse:
            return
        entries = (step.windows.first_local > self.tier.layers[sparse[0]].selected).nonzero().flatten().tolist()
        if entries:
            self._entry = self._random.choice(entries)
            self._sampled = set(self._random.sample(sparse, min(LAYERS_PER_AUDIT, len(sparse))))

    def observe(self, layer: int, step: DecodeStep, query: Tensor, scale: float) -> None:
        """Record the resident set of a layer before it attends; with policy `auto`, before missing blocks are fetched.

        Args:
            layer: layer of this rank.
            step: the decode step.
            query: [n * m, H*G, D].
            scale: softmax scale.
        """
        if layer not in self._sampled or step is not self._step:
            return
        row = int(step.rows[self._entry])
        window = self.tier.window(int(step.windows.length[self._entry]))
        look = _Look(
            layer,
            row,
            int(self.tier.rows.generation[row]),
            window,
            query[self._entry * step.tokens].clone(),
            self.tier.layers[layer].head_map[row].cpu().clone(),
            step.pages[self._entry, : window.open_block + 1].long(),
            scale,
        )
        self._looks.append(look)
        if len(self._looks) == len(self._sampled):
            self._running = self._thread.submit(self._run, self._looks)

    def is_poor(self, layer: int) -> bool:
        """Whether the layer's working set covers too little attention mass, before missing blocks are fetched."""
        mass = self.layers[layer].mass
        return mass is not None and mass < POOR_MASS

    def statistics(self) -> dict[str, Any]:
        """Return figures per layer, None for a layer without audits, and means over the audited layers."""
        seen = [layer for layer in self.layers if layer.mass is not None and layer.agreement is not None]
        return {
            "audits": self.audits,
            "agreement": sum(layer.agreement or 0 for layer in seen) / len(seen) if seen else None,
            "mass": sum(layer.mass or 0 for layer in seen) / len(seen) if seen else None,
            "worst_mass": min((layer.worst_mass for layer in seen), default=None),
            "layer_agreement": [layer.agreement for layer in self.layers],
            "layer_mass": [layer.mass for layer in self.layers],
        }

    def close(self) -> None:
        """End the thread after the audit that it is running."""
        self._thread.shutdown()

    def _busy(self) -> bool:
        return self._running is not None and not self._running.done()

    def _run(self, looks: Sequence[_Look]) -> None:
        try:
            if all(self._look(look) for look in looks):
                self.audits += 1
        except Exception as error:
            if type(error) not in self._failures:
                self._failures.add(type(error))
                logger.exception(
                    "Lookahead KV: an audit failed; decoding continues, and further failures are not logged."
                )

    def _look(self, look: _Look) -> bool:
        """Measure one layer; False if the pages may have been given to another request meanwhile."""
        keys = self.host.kv[look.layer][look.pages, :, 0]
        window = look.window
        found = measure_recall(look.query.cpu(), keys, window.length, look.resident, window.first_local, look.scale)
        if not self._still_owns(look):
            return False
        was_poor = self.is_poor(look.layer)
        self.layers[look.layer].add(found)
        if self.is_poor(look.layer) and not was_poor:
            logger.warning(
                "Lookahead KV: in layer %d the working set of a request of %d tokens covers %.1f%% of the attention "
                "mass and has %.1f%% of the best blocks; raise --lookahead-kv-budget-tokens or -fetch-ratio.",
                look.layer,
                window.length,
                100 * found.mass,
                100 * found.agreement,
            )
        return True

    def _still_owns(self, look: _Look) -> bool:
        """Whether the row still belongs to the same request and has the same pages; the prefix cache may swap one."""
        same = int(self.tier.rows.generation[look.row]) == look.generation
        return same and torch.equal(self.pages_of(look.row, len(look.pages)), look.pages)


def _take_what_is_left() -> None:
    """Limit the calling thread to one core, and to time in which no other thread wants that core."""
    torch.set_num_threads(1)
    if hasattr(os, "SCHED_IDLE"):  # Linux, where 0 is the calling thread
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
