"""Real text that is on every machine with Python: the language reference inside the standard library."""

from __future__ import annotations

from pydoc_data.topics import topics
from typing import Protocol


class Tokenizer(Protocol):
    def encode(self, text: str, /) -> list[int]: ...


def real_text_tokens(tokenizer: Tokenizer, count: int) -> list[int]:
    """The first `count` token ids of English technical prose. Raises `ValueError` if the text has fewer."""
    text = "\n\n".join(topic for _, topic in sorted(topics.items()))
    # The tokenizers used here make at most one token of a character, and at least one of sixteen characters.
    tokens = list(tokenizer.encode(text[: 16 * count]))[:count]
    if len(tokens) < count:
        raise ValueError(f"count must be at most the {len(tokens)} tokens of the text, got {count}")
    return tokens
