"""Hears when SGLang gives up a row, so that its resident set is released at once.

Read from sglang 0.5.23, `mem_cache/memory_pool.py`: ReqToTokenPool calls its aux cache on finish, abort, retraction and
flush. Nothing depends on this for correctness: a reused row is recognised by its generation.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from sglang_oasis.tier.resident_tier import ResidentTier


class RowObserver:
    """The aux-cache protocol of ReqToTokenPool.

    Args:
        tier: whose rows to keep current.
        dense_capacity: tokens that SGLang may schedule; the whole host pool, since this cache takes none of it.
        on_release: called after rows were given up.

    Attributes:
        tiers: all that follow the rows, the draft model's too.
    """

    def __init__(self, tier: ResidentTier, dense_capacity: int, on_release: Callable[[], None]) -> None:
        self.tiers = [tier]
        self._on_release = on_release
        self.dense_capacity = dense_capacity

    def free(self, row: int) -> None:
        for tier in self.tiers:
            tier.rows.release(int(row))
        self._on_release()

    def clear(self) -> None:
        for tier in self.tiers:
            tier.rows.clear()
        self._on_release()

    def reset_allocator(self) -> None:
        """SGLang has emptied its KV allocator, after `clear`."""
        self._on_release()

    def alloc_to_lengths(self, *, req_pool_indices_cpu: Tensor, target_seq_lens_cpu: Tensor) -> None:
        """Nothing to do: a row's slots are allocated for its whole life."""
