"""The table of a decode step, packed for the device: fixed addresses, fixed shapes, one copy per step."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from sglang_oasis.lookahead.policy import ahead_candidates, urgent_candidates
from sglang_oasis.lookahead.step import DecodeStep
from sglang_oasis.ops.device_step import StepTable
from sglang_oasis.tier.layout import TierLayout

PADDING_ROW, PADDING_LENGTH = 0, 1
"""The values of a padding entry, which decodes the first token of SGLang's dummy row."""

NO_BLOCK = -1


class HostTable(NamedTuple):
    """The fields of `StepTable` besides the rows, on the host; [n] each."""

    lengths: Tensor
    graduates: Tensor
    completed: Tensor
    expected: Tensor
    urgent: Tensor
    candidates: Tensor


_FIELDS = HostTable._fields


def tabulate(step: DecodeStep, layout: TierLayout, *, fetches: bool) -> HostTable:
    """Return what the device needs to know about a step.

    Args:
        step: the step.
        layout: the tier layout.
        fetches: True if missing blocks are fetched before attention and nothing is predicted; else the reverse.
    """
    none = torch.zeros_like(step.rows)
    urgent = urgent_candidates(step, layout) if fetches else none
    candidates = none if fetches else ahead_candidates(step, layout)
    lengths = step.windows.length
    return HostTable(lengths, step.graduating, step.completing, step.expecting, urgent, candidates)


class DeviceTables:
    """The tables of the current and the previous step, at fixed addresses, so that a graph can be captured with them.

    Args:
        max_rows: most entries of a step.
        device: where they live.

    Attributes:
        max_rows: as given.
        current, previous: [max_rows] each; entries beyond a step's own are padding.
    """

    def __init__(self, max_rows: int, device: torch.device) -> None:
        self.max_rows = max_rows
        self._packed = [_empty_table(max_rows).to(device) for _ in range(2)]
        self._rows = [torch.full((max_rows,), PADDING_ROW, dtype=torch.int64, device=device) for _ in range(2)]
        self.current, self.previous = (
            _views(rows, packed) for rows, packed in zip(self._rows, self._packed, strict=True)
        )

    def advance(self) -> None:
        """Make the current step the previous one."""
        for current, previous in (self._packed, self._rows):
            previous.copy_(current)

    def forget_previous(self) -> None:
        """Note that the previous step has no postponed tasks left."""
        self.previous.candidates.zero_()

    def load(self, rows: Tensor, table: HostTable, number: int) -> None:
        """Copy a step's table to the device, without waiting for it.

        Args:
            rows: [n] int64, on any device.
            table: [n] on the host; entries from n on become padding.
            number: number of the step.
        """
        packed, count = _empty_table(self.max_rows, pin=self._packed[0].is_cuda), len(table.lengths)
        for place, field in enumerate(_FIELDS):
            packed[place, :count] = getattr(table, field)
        packed[len(_FIELDS), 0] = number
        self._packed[0].copy_(packed, non_blocking=True)
        self._rows[0].fill_(PADDING_ROW)
        self._rows[0][: len(rows)].copy_(rows, non_blocking=True)


def first_entries(table: StepTable, count: int) -> StepTable:
    """Return the first `count` entries of a table."""
    return table._replace(**{name: field[:count] for name, field in table._asdict().items() if name != "number"})


def _empty_table(max_rows: int, pin: bool = False) -> Tensor:
    packed = torch.empty((len(_FIELDS) + 1, max_rows), dtype=torch.int32, pin_memory=pin)
    packed[0], packed[1:4], packed[4:] = PADDING_LENGTH, NO_BLOCK, 0
    return packed


def _views(rows: Tensor, packed: Tensor) -> StepTable:
    return StepTable(rows, number=packed[-1, :1], **dict(zip(_FIELDS, packed, strict=False)))
