"""Records which blocks every decode step attended to, for comparison with a reference and for research."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from sglang_oasis.engine.plan import DecodePlan
from sglang_oasis.tier.layout import TierLayout
from sglang_oasis.tier.resident_tier import ResidentTier


class SelectionTrace:
    """Writes one file per decode step, `step_00000001.pt`, that `torch.load` reads.

    The file is a dict of `rids` (request ids), `rows` [n], `seq_lens` [n] (the decoding token included), `block_size`,
    `first_local_block` [n] (this block and later ones are local) and `selected` [layers, n, H, K] int32 (logical
    blocks attended besides the local ones, -1 = empty slot; layers with fewer slots are padded).
    """

    def __init__(self, folder: Path, layout: TierLayout) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._layout = layout
        self._selected: list[Tensor] = []

    def record(self, layer: int, plan: DecodePlan, tier: ResidentTier) -> None:
        """Note what `layer` is about to attend to; the last layer writes the file."""
        head_map = tier.layers[layer].head_map[plan.step.rows].cpu()
        width = max(self._layout.selected_blocks)
        self._selected.append(torch.nn.functional.pad(head_map, (0, width - head_map.shape[-1]), value=-1))
        if layer == self._layout.num_layers - 1:
            self._write(plan)
            self._selected.clear()

    def _write(self, plan: DecodePlan) -> None:
        windows = plan.step.windows
        torch.save(
            {
                "rids": list(plan.rids),
                "rows": plan.step.rows,
                "seq_lens": windows.length,
                "block_size": self._layout.block_size,
                "first_local_block": windows.first_local,
                "selected": torch.stack(self._selected),
            },
            self._folder / f"step_{plan.step.number:08d}.pt",
        )
