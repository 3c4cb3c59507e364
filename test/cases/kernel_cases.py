"""What the tests of the C++ kernels and of their pipeline share.

`OASIS_KERNEL_EXAMPLES` is the number of random cases per test: fewer where the kernels are slow (scripts/sanitize.sh).
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from torch import Tensor

from sglang_oasis.ops.eviction import Maps
from sglang_oasis.ops.summary import SUMMARY_FORMATS, KeyStatistics, SummaryFormat, summarise

EXAMPLES = int(os.environ.get("OASIS_KERNEL_EXAMPLES", "100"))
THREADS = 3
ANY_CPU = torch.tensor([], dtype=torch.int64)
NOBODY = -(10**6)
"""An index nobody may follow."""

many = settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))

DTYPES = st.sampled_from([torch.float32, torch.float16, torch.bfloat16])
HEAD_DIMS = st.integers(1, 16).map(lambda n: 16 * n)
BLOCK_SIZES = st.sampled_from([8, 16, 32])
SEEDS = st.integers(0, 10_000)
FORMATS = pytest.mark.parametrize("fmt", SUMMARY_FORMATS.values(), ids=SUMMARY_FORMATS)


SCALED_TOLERANCES = {torch.float32: 2e-4, torch.float16: 1e-2, torch.bfloat16: 8e-2}
"""Relative, of scores from scaled queries, which devices round to the dtype of the queries."""


def fitted(fmt: SummaryFormat, heads: int, head_dim: int, rng: torch.Generator) -> SummaryFormat:
    """The format as it is, or relative to random statistics of keys, one of the two by chance."""
    zero, spread, reach = torch.randn(3, heads, head_dim, generator=rng)
    if zero[0, 0] < 0:
        return fmt
    return replace(fmt, scaling=KeyStatistics(zero, spread.abs(), reach.abs()).packed(0.7))


def records_of(keys: Tensor, fmt: SummaryFormat) -> Tensor:
    """Summaries of keys [..., H, N, B, D]: [..., H, N, R]."""
    return summarise(keys.transpose(-3, -4), fmt).transpose(-2, -3).contiguous()


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


class Heads(NamedTuple):
    """Shapes of one attention layer."""

    kv_heads: int
    group: int
    head_dim: int
    block_size: int


HEADS = st.builds(Heads, st.integers(1, 3), st.integers(1, 8), HEAD_DIMS, BLOCK_SIZES)


def occupied_maps(num_rows: int, kv_heads: int, selected: int, logical: int, rng: torch.Generator) -> Maps:
    """Selected slots with random blocks, selected in steps 0 to 3."""
    order = torch.rand((num_rows, kv_heads, logical), generator=rng).argsort(-1)
    head_map = order[..., :selected].int().contiguous()
    slots = torch.arange(selected).expand(num_rows, kv_heads, selected).int()
    slot_of = torch.full((num_rows, kv_heads, logical), -1, dtype=torch.int32)
    slot_of.scatter_(-1, head_map.long(), slots)
    ages = torch.randint(0, 4, head_map.shape, generator=rng, dtype=torch.int32)
    return Maps(head_map, ages, slot_of)
