"""How blocks are ranked for a query; a selector is a file in this folder, or an entry point of another package."""

from sglang_oasis.lookahead.selectors.base import SELECTORS, Selector, rank_blocks
from sglang_oasis.lookahead.selectors.bound import BoundSelector

__all__ = ["SELECTORS", "BoundSelector", "Selector", "rank_blocks"]
