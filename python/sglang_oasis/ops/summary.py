"""Block summaries, which rank a block without reading its keys (Quest-style bounds, OasisKV section 3.2).

In each coordinate the keys of a block span an interval; a summary holds the midpoints and the half ranges.
q @ midpoint + |q| @ half_range bounds every q @ key from above. The bound is loose, because no key reaches the best
end of the interval in all coordinates: a factor below 1 before the half range ranks blocks better.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from sglang_oasis.ops.dispatch import device_op

SCALE_DTYPE = torch.bfloat16
SMALLEST_SHARE, SMALLEST_SCALE = 0.05, 1e-6
"""Least spread and reach of a coordinate, as a share of the head's root mean square, and at all: a coordinate that
hardly varied in the text of the calibration must not take all codes from the others in a block in which it does."""


class KeyStatistics(NamedTuple):
    """What is typical for the blocks of one layer, [H, D] float32 each; see `python -m sglang_oasis.calibrate`.

    Keys have outlier coordinates, far from zero and with ranges of their own (KVQuant, arXiv 2401.18079, section 3.1),
    and 4 bits with one scale per vector leave nothing for the others. Relative to these statistics all coordinates of
    a summary have the same size.

    Attributes:
        zero: mean midpoint.
        spread: root mean square of midpoint - zero.
        reach: mean half range.
    """

    zero: Tensor
    spread: Tensor
    reach: Tensor

    @classmethod
    def of(cls, keys: Tensor) -> KeyStatistics:
        """Return the statistics of the blocks `keys` [N, H, B, D]."""
        midpoint, half_range = bounds(keys)
        zero = midpoint.mean(0)
        return cls(zero, (midpoint - zero).square().mean(0).sqrt(), half_range.mean(0))

    def packed(self, looseness: float = 1.0) -> Tensor:
        """Return the statistics as ops take them, [H, 5, D]: zero, 1 / spread, 1 / reach, spread, reach * looseness.

        Args:
            looseness: factor of the selector's tightness in this layer, whichever selector it is.
        """
        spread, reach = (
            torch.maximum(scale, SMALLEST_SHARE * scale.square().mean(-1, keepdim=True).sqrt()).clamp(SMALLEST_SCALE)
            for scale in (self.spread, self.reach)
        )
        return torch.stack([self.zero, 1 / spread, 1 / reach, spread, reach * looseness], dim=1).float().contiguous()


@dataclass(frozen=True)
class SummaryFormat:
    """How the two vectors of a summary are stored, as one record of bytes.

    bf16: midpoint, half range. int8 and int4: midpoint codes (signed), half-range codes (unsigned), then one bfloat16
    scale for each vector. A byte with two 4-bit codes holds coordinate d in its low bits and d + D/2 in its high bits.

    Attributes:
        name: "bf16", "int8" or "int4".
        bits: bits per coordinate.
        scaling: [H, 5, D] float32, `KeyStatistics.packed` of a layer: what is stored is (midpoint - zero) / spread and
            half range / reach. None stores midpoints and half ranges as they are.
    """

    name: str
    bits: int
    scaling: Tensor | None = field(default=None, compare=False)

    @property
    def quantised(self) -> bool:
        return self.bits < 16

    def record_bytes(self, head_dim: int) -> int:
        """R: bytes of one summary."""
        scales = 2 * SCALE_DTYPE.itemsize if self.quantised else 0
        return 2 * head_dim * self.bits // 8 + scales

    def to(self, device: torch.device) -> SummaryFormat:
        """Return this format with its scaling on a device."""
        return self if self.scaling is None else replace(self, scaling=self.scaling.to(device))


SUMMARY_FORMATS = {name: SummaryFormat(name, bits) for name, bits in (("bf16", 16), ("int8", 8), ("int4", 4))}


def summarise(keys: Tensor, fmt: SummaryFormat) -> Tensor:
    """Return the summaries of completed blocks.

    Args:
        keys: [..., B, D]; [..., H, B, D] with a scaling.
        fmt: how to store them.

    Returns:
        [..., R] uint8.
    """
    midpoint, half_range = bounds(keys)
    if fmt.scaling is not None:
        zero, inverse_spread, inverse_reach, _, _ = fmt.scaling.unbind(1)
        midpoint, half_range = (midpoint - zero) * inverse_spread, half_range * inverse_reach
    return pack(torch.stack([midpoint, half_range], dim=-2), fmt)


def bounds(keys: Tensor) -> tuple[Tensor, Tensor]:
    """Return midpoint and half range [..., D] float32 of the keys [..., B, D], coordinate by coordinate."""
    low, high = torch.aminmax(keys.float(), dim=-2)
    return (low + high) / 2, (high - low) / 2


@device_op
def summarise_pages(host_kv: Tensor, pages: Tensor, fmt: SummaryFormat, records: Tensor) -> None:
    """Rebuild the summaries of completed pages.

    Args:
        host_kv: [N_pages, H, 2, B, D].
        pages: [P] int64.
        fmt: how to store them.
        records: [N_pages, H, R] uint8, written.
    """
    records[pages] = summarise(host_kv[pages, :, 0], fmt)


def pack(vectors: Tensor, fmt: SummaryFormat) -> Tensor:
    """Convert midpoints and half ranges [..., 2, D] float32 to records [..., R] uint8."""
    if not fmt.quantised:
        return vectors.bfloat16().flatten(-2).view(torch.uint8)
    largest = torch.tensor([2 ** (fmt.bits - 1) - 1, 2**fmt.bits - 1], device=vectors.device)[:, None]
    scales = (vectors.abs().amax(-1, keepdim=True) / largest).to(SCALE_DTYPE)
    codes = vectors / scales.float().clamp(min=torch.finfo(torch.float32).tiny)
    codes = codes.round().clamp(-largest, largest).to(torch.int16) & (2**fmt.bits - 1)
    if fmt.bits == 4:
        low, high = codes.chunk(2, dim=-1)
        codes = low | high << 4
    return torch.cat([codes.to(torch.uint8).flatten(-2), scales.flatten(-2).view(torch.uint8)], dim=-1)


def vectors(records: Tensor, fmt: SummaryFormat) -> Tensor:
    """Return the midpoints and half ranges [..., H, N, 2, D] float32 of the records [..., H, N, R]."""
    stored = unpack(records, fmt)
    if fmt.scaling is None:
        return stored
    zero, _, inverse_reach, spread, _ = fmt.scaling.unsqueeze(1).unbind(2)
    return torch.stack([stored[..., 0, :] * spread + zero, stored[..., 1, :] / inverse_reach], dim=-2)


def unpack(records: Tensor, fmt: SummaryFormat) -> Tensor:
    """Convert records [..., R] uint8 to midpoints and half ranges [..., 2, D] float32."""
    if not fmt.quantised:
        return records.contiguous().view(torch.bfloat16).unflatten(-1, (2, -1)).float()
    width = 2 * SCALE_DTYPE.itemsize
    scales = records[..., -width:].contiguous().view(SCALE_DTYPE).float().unsqueeze(-1)
    codes = records[..., :-width].unflatten(-1, (2, -1)).to(torch.int16)
    if fmt.bits == 4:
        codes = torch.cat([codes & 15, codes >> 4], dim=-1)
    midpoint, half_range = codes.unbind(-2)
    sign = 2 ** (fmt.bits - 1)
    return torch.stack([(midpoint ^ sign) - sign, half_range], dim=-2) * scales


@device_op
def block_scores(
    queries: Tensor, records: Tensor, fmt: SummaryFormat, candidates: Tensor, scale: float, tightness: float
) -> Tensor:
    """Return scores of blocks: softmax of the estimate per query head, then the mean over the group and the queries.

    The estimate is q @ midpoint + tightness * |q| @ half_range. The mean of softmaxes captures about 1% more
    attention mass than the maximum over the group.

    Args:
        queries: [n, Q, H*G, D], Q queries per row.
        records: [n, H, N, R] uint8.
        fmt: how they are stored.
        candidates: [n] int64, blocks [0, candidates) of each row may be chosen.
        scale: softmax scale of the attention.
        tightness: 1 gives an upper bound on every key's score; a smaller value gives a score that a key may well reach.

    Returns:
        [n, H, N] float32, larger is better; blocks that are no candidates get -inf.
    """
    n, num_queries, _, head_dim = queries.shape
    kv_heads, num_blocks = records.shape[1:3]
    query = queries.view(n, num_queries, kv_heads, -1, head_dim).transpose(1, 2).flatten(2, 3).float()
    around = query.abs()
    if fmt.scaling is not None:  # q @ zero is the same for all blocks, and no rank depends on it
        query, around = query * fmt.scaling[:, 3:4], around * fmt.scaling[:, 4:5]
    both = torch.cat([query, around * tightness], dim=-1)
    scores = torch.matmul(both, unpack(records, fmt).flatten(-2).transpose(-1, -2)).mul_(scale)
    absent = torch.arange(num_blocks, device=scores.device) >= candidates.to(scores.device).unsqueeze(1)
    scores.masked_fill_(absent[:, None, None], float("-inf"))
    ranking = torch.softmax(scores, dim=-1).mean(dim=2)
    return ranking.masked_fill_(absent[:, None], float("-inf"))
