"""What the host knows about the rows of a forward pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class DecodeBatch:
    """Rows that decode m tokens each: a committed token and the drafts after it, or drafts alone.

    Attributes:
        rows: [n] int64 on the host.
        generations: [n] int64 on the host; a new generation of a row means another request.
        lengths: [n] int64 on the host, committed tokens of each row, including the first of its m tokens.
        tokens: m.
        first: distance of the first of the m tokens from the newest committed token; 0 when it is that token.
        rids: request ids.
        entries: entries of the tensors that the layers get, padding included; None for as many as there are rows.
        device_rows: `rows` on the engine's device; None to copy them there.
        real: False for a batch of a warm-up or of a graph capture, which no counter counts.
    """

    rows: Tensor
    generations: Tensor
    lengths: Tensor
    tokens: int = 1
    first: int = 0
    rids: Sequence[str] = ()
    entries: int | None = None
    device_rows: Tensor | None = None
    real: bool = True


@dataclass(frozen=True)
class PrefillBatch:
    """Rows for which new prompt tokens are computed.

    Attributes:
        rows, generations: per request, on the host.
        prefixes: per request, tokens that are already in the host pool.
        new_tokens: per request, tokens that the pass computes.
        last_chunks: per request, whether decode follows.
        indices: [t] int64 on the engine's device, KV indices of the new tokens.
        device_rows: [n] int64, the rows on the engine's device; None to copy them there.
    """

    rows: Sequence[int]
    generations: Sequence[int]
    prefixes: Sequence[int]
    new_tokens: Sequence[int]
    last_chunks: Sequence[bool]
    indices: Tensor
    device_rows: Tensor | None = None
