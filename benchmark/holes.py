"""Texts with holes, which other text fills until they are as long as they should be."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction
from itertools import pairwise

HOLE = "<hole>"
"""Stands in a text for filler."""


def fill_holes(
    encode: Callable[[str], list[int]],
    text: str,
    size: int,
    cut: Callable[[int, int, int], Sequence[int]],
    shares: Sequence[float | Fraction] | None = None,
) -> list[int]:
    """Return the text as `size` tokens.

    Args:
        encode: text -> tokens.
        text: with one HOLE or more.
        size: tokens.
        cut: (hole, start, end) -> the filler of a hole, which gets the tokens from `start` to `end` of all filler.
        shares: of the filler that each hole gets; None for equal ones.

    Raises:
        ValueError: the text is too long without filler, or a filler is too short.
    """
    parts = [encode(part) for part in text.split(HOLE)]
    room = size - sum(map(len, parts))
    if room < 0:
        raise ValueError(f"the text has {size - room} tokens without what fills it, more than {size}")
    holes = len(parts) - 1
    shares = shares or [Fraction(1, holes)] * holes
    edges = [int(room * sum(shares[:hole])) for hole in range(holes + 1)]
    tokens = parts[0]
    for hole, (start, end) in enumerate(pairwise(edges)):
        filler = list(cut(hole, start, end))
        if len(filler) < end - start:
            raise ValueError(f"a filler has {len(filler)} tokens, {end - start} were asked for")
        tokens = tokens + filler + parts[hole + 1]
    return tokens
