"""Which queries look ahead; a source is a file in this folder, or an entry point of another package."""

from sglang_oasis.lookahead.sources.base import SOURCES, Source
from sglang_oasis.lookahead.sources.drafts import drafts
from sglang_oasis.lookahead.sources.last_query import last_query

__all__ = ["SOURCES", "Source", "drafts", "last_query"]
