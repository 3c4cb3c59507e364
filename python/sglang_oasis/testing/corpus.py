"""Real text that is on every machine: the language reference inside the standard library."""

from __future__ import annotations

from pydoc_data.topics import topics
from typing import Protocol


class Tokenizer(Protocol):
    def encode(self, text: str, /) -> list[int]: ...


def real_text_tokens(tokenizer: Tokenizer, count: int) -> list[int]:
    """The first `count` token ids of English technical prose. Raises `ValueError` if the text has fewer."""
    text = "\n\n".join(topic for _, topic in sorted(topics.items()))
    # No tokenizer that matters here makes more than one token of a character, or fewer than one of sixteen.
    tokens = list(tokenizer.encode(text[: 16 * count]))[:count]
    if len(tokens) < count:
        raise ValueError(f"the text has {len(tokens)} tokens, {count} were asked for")
    return tokens
