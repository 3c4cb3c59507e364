"""Reads the selections that a server records, one file per decode step, if `SGLANG_OASIS_TRACE_DIR` is a folder."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor


class StepSelection(NamedTuple):
    """The blocks that one request attends to in one decode step."""

    seq_len: int
    """Length including the token whose query attends."""
    block_size: int
    first_local_block: int
    """Blocks from this one on are local (recent and open) and always attended."""
    selected: Tensor
    """int32 `[layers, H, K]`: logical blocks attended besides the local ones, -1 for an empty slot, in any order."""

    @property
    def attended_tokens(self) -> Tensor:
        """Return the number of tokens attended per layer and KV head: int64 `[layers, H]`."""
        local = self.seq_len - self.first_local_block * self.block_size
        return (self.selected >= 0).sum(-1) * self.block_size + local


def load_trace(directory: Path, rid: str) -> list[StepSelection]:
    """Return the recorded selections of request `rid`, ordered by step. Raises `ValueError` if there are none."""
    steps = []
    for path in sorted(directory.glob("step_*.pt")):
        record = torch.load(path, weights_only=True)
        for i in (i for i, recorded in enumerate(record["rids"]) if recorded == rid):
            steps.append(
                StepSelection(
                    seq_len=int(record["seq_lens"][i]),
                    block_size=int(record["block_size"]),
                    first_local_block=int(record["first_local_block"][i]),
                    selected=record["selected"][:, i].clone(),
                )
            )
    if not steps:
        raise ValueError(f"no step of request {rid!r} is recorded in {directory}")
    return steps
