"""Computes which blocks of a row are selectable, local and complete at a given length, without access to memory.

    |<- sinks ->|                       |<-- recent -->|
    [ 0 ][ 1 ]...[ first_local - 1 ][ first_local ] ... [ open ]
    |<------- selectable ---------->|<------- local ---------->|

Every selectable block is complete. Draft tokens may follow the newest committed token; they do not move the window.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Window(NamedTuple):
    """The block window of a row with `length` committed tokens, including the one being written.

    Attributes:
        length: committed tokens, at least 1.
        block_size: B.
        recent_blocks: completed blocks before the open one that stay local.
    """

    length: int
    block_size: int
    recent_blocks: int

    @property
    def open_block(self) -> int:
        """Block of the newest committed token."""
        return (self.length - 1) // self.block_size

    @property
    def open_fill(self) -> int:
        """Committed tokens of the open block, 1 to B."""
        return (self.length - 1) % self.block_size + 1

    @property
    def first_local(self) -> int:
        """First block served from the local slots."""
        return max(0, self.open_block - self.recent_blocks)

    @property
    def complete_blocks(self) -> int:
        """Blocks whose tokens are all committed."""
        return self.length // self.block_size

    @property
    def next(self) -> Window:
        """The window one token later."""
        return self.later(1)

    def later(self, tokens: int) -> Window:
        """Return the window after `tokens` more committed tokens."""
        return self._replace(length=self.length + tokens)


class Windows(NamedTuple):
    """The windows of n rows; every property of `Window`, as [n] int64.

    Attributes:
        length: [n] int64.
        block_size, recent_blocks: as in `Window`.
    """

    length: Tensor
    block_size: int
    recent_blocks: int

    @property
    def open_block(self) -> Tensor:
        return (self.length - 1) // self.block_size

    @property
    def open_fill(self) -> Tensor:
        return (self.length - 1) % self.block_size + 1

    @property
    def first_local(self) -> Tensor:
        return (self.open_block - self.recent_blocks).clamp(min=0)

    @property
    def complete_blocks(self) -> Tensor:
        return self.length // self.block_size

    @property
    def next(self) -> Windows:
        return self.later(1)

    def later(self, tokens: int) -> Windows:
        return self._replace(length=self.length + tokens)
