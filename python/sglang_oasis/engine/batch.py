"""What the host knows of the rows of a forward pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class DecodeBatch:
    """Rows that decode m tokens each: a committed one and drafts behind it, or drafts alone.

    Attributes:
        rows: [n] int64 on the host.
        generations: [n] int64 on the host; another generation of a row is another request.
        lengths: [n] int64 on the host, committed tokens of each row, the first of its m included.
        tokens: m.
        first: how far the first of the m tokens is from the newest committed one; 0 when it is that one.
        rids: request ids.
        entries: of the tensors that the layers get, padding included; None for as many as rows.
        device_rows: `rows` where the engine's device has them; None to copy them.
        real: False for what warms up or is captured, which counts nowhere.
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
    """Rows that get new prompt tokens.

    Attributes:
        rows, generations: per request, on the host.
        prefixes: per request, tokens that the host pool has.
        new_tokens: per request, tokens that the pass computes.
        last_chunks: per request, whether decode follows.
        indices: [t] int64 on the engine's device, KV indices of the new tokens.
        device_rows: [n] int64 where the engine's device has the rows; None to copy them.
    """

    rows: Sequence[int]
    generations: Sequence[int]
    prefixes: Sequence[int]
    new_tokens: Sequence[int]
    last_chunks: Sequence[bool]
    indices: Tensor
    device_rows: Tensor | None = None
