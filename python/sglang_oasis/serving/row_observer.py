"""Releases the resident set of a row as soon as SGLang gives the row up.

Read from sglang 0.5.23, `mem_cache/memory_pool.py`: ReqToTokenPool calls its aux cache on finish, abort, retraction and
flush. Correctness does not depend on this, because the generation shows that a row is reused.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from sglang_oasis.tier.resident_tier import ResidentTier


class RowObserver:
    """An aux cache of ReqToTokenPool.

    Args:
        tier: the resident tier whose rows are released.
        dense_capacity: tokens that SGLang may schedule: the whole host pool, because this cache takes none of it.
        on_release: called after rows were released.

    Attributes:
        tiers: all tiers that hold the same rows, including that of a draft model.
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
        """Do nothing: SGLang calls this after `clear`, when it has emptied its KV allocator."""
        self._on_release()

    def alloc_to_lengths(self, *, req_pool_indices_cpu: Tensor, target_seq_lens_cpu: Tensor) -> None:
        """Do nothing: a row's slots are allocated for its whole life."""
