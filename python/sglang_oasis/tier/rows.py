"""Who owns each row of the resident tier: a row is identified by (row, generation)."""

from __future__ import annotations

from dataclasses import dataclass

from sglang_oasis.tier.window import Window


@dataclass
class RowState:
    """What the resident tier holds for one row.

    Attributes:
        generation: SGLang's generation of the row when it was built.
        window: the window that the local slots and the head map serve.
        summarised_blocks: leading blocks whose summaries are on the device.
    """

    generation: int
    window: Window
    summarised_blocks: int

    def advance(self, window: Window) -> None:
        """Move on to a longer window."""
        self.window = window
        self.summarised_blocks = window.complete_blocks


class RowTable:
    """Rows that hold a resident set; reuse of a row by another request shows as another generation."""

    def __init__(self) -> None:
        self._rows: dict[int, RowState] = {}

    def __len__(self) -> int:
        return len(self._rows)

    def claim(self, row: int, generation: int, window: Window) -> RowState:
        """Give `row` to (row, generation), whoever held it before."""
        state = self._rows[row] = RowState(generation, window, window.complete_blocks)
        return state

    def release(self, row: int) -> None:
        """Forget the row's resident set; a row that holds none is left alone."""
        self._rows.pop(row, None)

    def clear(self) -> None:
        self._rows.clear()

    def find(self, row: int, generation: int) -> RowState | None:
        """The state of (row, generation), None when another generation or nobody holds the row."""
        state = self._rows.get(row)
        return state if state is not None and state.generation == generation else None

    def items(self) -> list[tuple[int, RowState]]:
        return list(self._rows.items())
