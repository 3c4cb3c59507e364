"""Shapes and bytes of the tiers; only this file converts blocks and tokens to bytes."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sglang_oasis.config import FETCH, LookaheadKVConfig
from sglang_oasis.errors import LookaheadKVError
from sglang_oasis.ops.summary import SUMMARY_FORMATS, SummaryFormat

MAP_DTYPE = torch.int32
SCORE_DTYPE = torch.float32


@dataclass(frozen=True)
class TierLayout:
    """Sizes of every tier on one TP rank.

    Attributes:
        num_layers: attention layers on this rank.
        kv_heads: H, KV heads on this rank.
        head_dim: D, head size of both keys and values.
        dtype: element type of K and V.
        block_size: B, tokens per block.
        selected_blocks: per layer, K; a dense layer has `max_blocks`.
        recent_blocks: completed blocks before the open one that are always local.
        sink_blocks: first blocks that are always selected.
        max_blocks: N, most logical blocks of a row.
        summary_format: how summaries are stored.
        draft_tokens: most tokens beyond the committed ones that a step may write.
        smoothed: whether rows keep an average score of every block, in sparse layers.
    """

    num_layers: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    block_size: int
    selected_blocks: tuple[int, ...]
    recent_blocks: int
    sink_blocks: int
    max_blocks: int
    summary_format: SummaryFormat
    draft_tokens: int = 0
    smoothed: bool = False

    @classmethod
    def of(
        cls,
        config: LookaheadKVConfig,
        *,
        num_layers: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        context_length: int,
        draft_tokens: int = 0,
    ) -> TierLayout:
        """Return the layout for a model with at most `context_length` tokens per request."""
        config.check_layers(num_layers)
        # One block more than the context: a decode step that was already launched when its request
        # reached the limit still writes one token.
        max_blocks = -(-context_length // config.block_size) + 1
        sparse = min(config.selected_blocks, max_blocks)
        dense = set(config.dense_layers)
        return cls(
            num_layers=num_layers,
            kv_heads=kv_heads,
            head_dim=head_dim,
            dtype=dtype,
            block_size=config.block_size,
            selected_blocks=tuple(max_blocks if layer in dense else sparse for layer in range(num_layers)),
            recent_blocks=min(config.recent_blocks, max_blocks),
            sink_blocks=config.sink_blocks,
            max_blocks=max_blocks,
            summary_format=SUMMARY_FORMATS[config.summary_dtype],
            draft_tokens=draft_tokens,
            smoothed=config.smoothing > 0 and config.miss_policy != FETCH,
        )

    @property
    def local_slots(self) -> int:
        """R: recent blocks, the open block, and the blocks that draft tokens may spill into."""
        return self.recent_blocks + 1 + -(-self.draft_tokens // self.block_size)

    @property
    def sparse_layers(self) -> frozenset[int]:
        """Layers in which a row can have more blocks than slots."""
        return frozenset(layer for layer, selected in enumerate(self.selected_blocks) if selected < self.max_blocks)

    @property
    def chunk_bytes(self) -> int:
        """Bytes of K and V of one block of one head in one layer: the unit of every transfer."""
        return 2 * self.block_size * self.head_dim * self.dtype.itemsize

    @property
    def summary_bytes(self) -> int:
        """Bytes of the summary of one block of one head in one layer."""
        return self.summary_format.record_bytes(self.head_dim)

    @property
    def host_page_bytes(self) -> int:
        """Bytes of one host page in all layers and heads, with its summaries."""
        return self.num_layers * self.kv_heads * (self.chunk_bytes + self.summary_bytes)

    @property
    def row_summary_bytes(self) -> int:
        """Bytes of the device summaries of one row in all layers and heads."""
        return self.num_layers * self.kv_heads * self.max_blocks * self.summary_bytes

    @property
    def row_bytes(self) -> int:
        """Device bytes of one row: resident slots, head map, its inverse, last-selected steps, scores, summaries."""
        selected = sum(self.selected_blocks)
        slots = selected + self.num_layers * self.local_slots
        maps = (2 * selected + self.num_layers * self.max_blocks) * MAP_DTYPE.itemsize
        averages = self.smoothed * len(self.sparse_layers) * self.max_blocks * SCORE_DTYPE.itemsize
        return self.kv_heads * (slots * self.chunk_bytes + maps + averages) + self.row_summary_bytes

    def step_bytes(self, cap: int) -> int:
        """Return the bytes of one row's fetch in a decode step: `cap` blocks per KV head of each sparse layer."""
        return self.kv_heads * self.chunk_bytes * len(self.sparse_layers) * cap

    def rows_in(self, device_bytes: int, draft_row_bytes: int = 0) -> int:
        """Return how many requests can decode in `device_bytes`; one more row is needed for SGLang's padding row 0.

        Args:
            device_bytes: bytes for all rows.
            draft_row_bytes: bytes that a row takes in addition, in the tiers of a draft model.

        Raises:
            LookaheadKVError: not even one request fits.
        """
        row_bytes = self.row_bytes + draft_row_bytes
        rows = device_bytes // row_bytes - 1
        if rows < 1:
            raise LookaheadKVError(
                f"--lookahead-kv-device-gb of {device_bytes / 1e9:.3f} GB is too small for one request, which takes "
                f"{2 * row_bytes / 1e9:.3f} GB with its padding row: raise it, or lower "
                f"--lookahead-kv-budget-tokens or --context-length."
            )
        return rows


def fetch_cap(fetch_ratio: float, selected_blocks: int) -> int:
    """Return C, the largest number of blocks admitted per KV head, layer and step."""
    return max(1, int(fetch_ratio * selected_blocks))
