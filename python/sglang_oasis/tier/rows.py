"""Records which request owns each row of the resident tier, identified by (row, generation)."""

from __future__ import annotations

import torch
from torch import Tensor

NOBODY = -1


class RowTable:
    """The rows that hold a resident set; a row that another request reuses has another generation.

    Args:
        num_rows: S.

    Attributes:
        generation: [S] int64, SGLang's generation of the row when it was built, NOBODY if nothing is resident.
        length: [S] int64, committed tokens that the local slots, the head map and the summaries cover.
    """

    def __init__(self, num_rows: int) -> None:
        self.generation = torch.full((num_rows,), NOBODY, dtype=torch.int64)
        self.length = torch.zeros(num_rows, dtype=torch.int64)

    def __len__(self) -> int:
        return int((self.generation != NOBODY).sum())

    def claim(self, row: int, generation: int, length: int) -> None:
        """Give `row` to (row, generation), whoever held it before."""
        self.generation[row], self.length[row] = generation, length

    def release(self, row: int) -> None:
        """Remove the row's resident set, if it has one."""
        self.generation[row] = NOBODY

    def clear(self) -> None:
        self.generation.fill_(NOBODY)

    def live(self, rows: Tensor, generations: Tensor) -> Tensor:
        """Return which of the pairs (row, generation), [n] int64 each, hold a resident set: [n] bool."""
        return self.generation[rows] == generations

    def advance(self, rows: Tensor, lengths: Tensor) -> None:
        """Set larger lengths [n] int64 of rows [n] int64."""
        self.length[rows] = lengths

    def occupied(self) -> list[int]:
        """Return the rows that hold a resident set."""
        return (self.generation != NOBODY).nonzero().flatten().tolist()
