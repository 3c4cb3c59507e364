"""Block summaries, which rank a block without reading its keys (Quest-style bounds, OasisKV section 3.2).

In each coordinate the keys of a block span an interval; a summary holds the midpoints and the half ranges.
q @ midpoint + |q| @ half_range bounds every q @ key from above. The bound is loose, because no key reaches the best
end of the interval in all coordinates: a factor below 1 before the half range ranks blocks better.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sglang_oasis.ops.dispatch import device_op

SCALE_DTYPE = torch.bfloat16


@dataclass(frozen=True)
class SummaryFormat:
    """How the two vectors of a summary are stored, as one record of bytes.

    bf16: midpoint, half range. int8 and int4: midpoint codes (signed), half-range codes (unsigned), then one bfloat16
    scale for each vector. A byte with two 4-bit codes holds coordinate d in its low bits and d + D/2 in its high bits.

    Attributes:
        name: "bf16", "int8" or "int4".
        bits: bits per coordinate.
    """

    name: str
    bits: int

    @property
    def quantised(self) -> bool:
        return self.bits < 16

    def record_bytes(self, head_dim: int) -> int:
        """R: bytes of one summary."""
        scales = 2 * SCALE_DTYPE.itemsize if self.quantised else 0
        return 2 * head_dim * self.bits // 8 + scales


SUMMARY_FORMATS = {name: SummaryFormat(name, bits) for name, bits in (("bf16", 16), ("int8", 8), ("int4", 4))}


def summarise(keys: Tensor, fmt: SummaryFormat) -> Tensor:
    """Return the summaries of completed blocks.

    Args:
        keys: [..., B, D].
        fmt: how to store them.

    Returns:
        [..., R] uint8.
    """
    low, high = torch.aminmax(keys.float(), dim=-2)
    vectors = torch.stack([(low + high) / 2, (high - low) / 2], dim=-2)
    return pack(vectors, fmt)


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
    both = torch.cat([query, query.abs() * tightness], dim=-1)
    scores = torch.matmul(both, unpack(records, fmt).flatten(-2).transpose(-1, -2)).mul_(scale)
    absent = torch.arange(num_blocks, device=scores.device) >= candidates.to(scores.device).unsqueeze(1)
    scores.masked_fill_(absent[:, None, None], float("-inf"))
    ranking = torch.softmax(scores, dim=-1).mean(dim=2)
    return ranking.masked_fill_(absent[:, None], float("-inf"))
