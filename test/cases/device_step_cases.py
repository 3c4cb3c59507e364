"""Random states of both tiers, and decode steps over them, for the tests of the ops that a device drives alone.

Whatever a step may not read is NaN, or an index nobody may follow.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from torch import Tensor

from sglang_oasis.ops.device_step import DeviceAdmissions, LayerState, NewTokens, StepTable
from sglang_oasis.ops.eviction import Maps
from sglang_oasis.ops.summary import SummaryFormat
from test.cases.kernel_cases import DTYPES, occupied_maps, records_of
from test.cases.places import Place

few = settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))

ODD = 77
"""Fills records that were never written; no scale of one is finite for long in a softmax."""


class Shape(NamedTuple):
    """Of a layer of both tiers.

    Attributes:
        rows, heads, selected, local, block_size, head_dim, logical: S, H, K, R, B, D, N.
        dtype: of K and V in both tiers.
    """

    rows: int
    heads: int
    selected: int
    local: int
    block_size: int
    head_dim: int
    logical: int
    dtype: torch.dtype


SHAPES = st.builds(
    Shape,
    rows=st.just(3),
    heads=st.integers(1, 2),
    selected=st.integers(2, 6),
    local=st.integers(2, 3),
    block_size=st.sampled_from([8, 16, 32]),
    head_dim=st.sampled_from([16, 64, 80, 96, 128]),
    logical=st.just(13),
    dtype=DTYPES,
)


class Layer(NamedTuple):
    """Both tiers of a layer."""

    blocks: Tensor
    maps: Maps
    summaries: Tensor
    host_kv: Tensor
    host_summaries: Tensor
    req_to_token: Tensor

    @property
    def state(self) -> LayerState:
        """As the ops take it."""
        return LayerState(
            self.blocks, self.maps, self.summaries, None, self.host_kv, self.host_summaries, self.req_to_token
        )

    def copy(self) -> Layer:
        clone = [Maps(*(m.clone() for m in x)) if isinstance(x, Maps) else x.clone() for x in self]
        return Layer(*clone)  # type: ignore[arg-type]

    def on(self, place: Place) -> Layer:
        """A copy where kernels can work on it."""
        host = {"host_kv": place.pin(self.host_kv), "host_summaries": place.pin(self.host_summaries)}
        return place.put_all(self)._replace(maps=place.put_all(self.maps), **host)

    def memory(self) -> dict[str, Tensor]:
        """All that a step may write, without padding: row 0 and page 0."""
        tensors = {"blocks": self.blocks, "summaries": self.summaries, **self.maps._asdict()}
        tensors |= {"host_kv": self.host_kv, "host_summaries": self.host_summaries}
        return {name: tensor[1:] for name, tensor in tensors.items()}


def poisoned(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.full(shape, float("nan"), dtype=dtype)


def make_layer(shape: Shape, fmt: SummaryFormat, rng: torch.Generator) -> Layer:
    """All slots occupied with random blocks, every page of K and V NaN."""
    rows, heads, selected, local, size, dim, logical, dtype = shape
    pages = 1 + (rows - 1) * logical
    table = torch.zeros(rows, logical * size, dtype=torch.int32)
    order = 1 + torch.randperm(pages - 1, generator=rng).view(rows - 1, logical)
    table[1:] = (order[:, :, None] * size + torch.arange(size)).flatten(1).int()
    return Layer(
        poisoned((rows, heads, selected + local, 2, size, dim), dtype),
        occupied_maps(rows, heads, selected, logical, rng),
        torch.full((rows, heads, logical, fmt.record_bytes(dim)), ODD, dtype=torch.uint8),
        poisoned((pages, heads, 2, size, dim), dtype),
        torch.full((pages, heads, fmt.record_bytes(dim)), ODD, dtype=torch.uint8),
        table,
    )


def fill_summaries(layer: Layer, counts: Tensor, fmt: SummaryFormat, rng: torch.Generator) -> None:
    """Real summaries of the first `counts` blocks of rows 1, 2, ...; the others are NaN where the format has NaN."""
    size, dim = layer.blocks.shape[-2:]
    layer.summaries.fill_(255)
    for row, count in enumerate(counts.tolist(), 1):
        keys = torch.randn((layer.summaries.shape[1], count, size, dim), generator=rng)
        layer.summaries[row, :, :count] = records_of(keys, fmt)


def entries(live: int, padding: int, rng: torch.Generator) -> Tensor:
    """[live + padding] int64: distinct rows from 1 on, and row 0 for padding, in any order."""
    rows = torch.cat([1 + torch.randperm(live, generator=rng), torch.zeros(padding, dtype=torch.int64)])
    return rows[torch.randperm(len(rows), generator=rng)]


def table_of(rows: Tensor, number: int, **columns: Tensor) -> StepTable:
    """A step in which what is not given does not happen."""
    nothing = {"lengths": 1, "graduates": -1, "completed": -1, "expected": -1, "urgent": 0, "candidates": 0}
    made = {name: torch.full((len(rows),), value, dtype=torch.int32) for name, value in nothing.items()}
    made |= {name: column.int() for name, column in columns.items()}
    return StepTable(rows=rows, number=torch.tensor([number], dtype=torch.int32), **made)


def empty_admissions(n: int, heads: int, most: int) -> DeviceAdmissions:
    return DeviceAdmissions(*torch.full((2, n, heads, most), 10**6, dtype=torch.int32))


def assert_same_bits(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name, tensor in got.items():
        assert torch.equal(tensor.cpu().view(torch.uint8), expected[name].cpu().view(torch.uint8)), name


class TokenStep(NamedTuple):
    """The arguments of `take_tokens` besides the layer and the format."""

    table: StepTable
    tokens: NewTokens


def make_token_step(layer: Layer, live: int, padding: int, tokens: int, first: int, rng: torch.Generator) -> TokenStep:
    """A step of `tokens` tokens per row; the local blocks before it are filled with random K and V.

    About half of the rows that may graduate, complete or expect a block do so.
    """
    size, dim = layer.blocks.shape[-2:]
    heads, selected, logical = layer.blocks.shape[1], layer.maps.head_map.shape[-1], layer.maps.slot_of.shape[-1]
    local = layer.blocks.shape[2] - selected
    rows = entries(live, padding, rng)
    lengths = torch.randint(1, (logical - 1) * size - tokens - first, (len(rows),), generator=rng)
    table = table_of(rows, int(torch.randint(1, 50, (1,), generator=rng)), lengths=lengths)
    indices = torch.zeros(len(rows), tokens, dtype=torch.int64)
    filled = torch.randn((len(rows), heads, local, 2, size, dim), generator=rng).to(layer.blocks)
    for i, row in enumerate(rows.tolist()):
        open_block = (int(lengths[i]) - 1) // size
        before = max(0, open_block - local + 1)
        for block in range(before, open_block + 1):
            layer.blocks[row, :, selected + block % local] = filled[i, :, block % local]
        if row == 0:
            continue
        start = int(lengths[i]) - 1 + first
        indices[i] = layer.req_to_token[row, start : start + tokens]
        happens = torch.rand(3, generator=rng) < 0.5
        if happens[0] and open_block >= local:
            table.graduates[i] = open_block - local
            slot = selected + (open_block - local) % local
            layer.blocks[row, :, slot] = filled[i, :, slot - selected]
        if happens[1]:  # the open block counts as full: its last tokens need not be there for a summary to be one
            table.completed[i] = open_block
        if happens[2] and open_block > before:
            table.expected[i] = open_block - 1
    whole = torch.randn((2, len(rows) * tokens, heads + 1, dim), generator=rng)
    keys, values = whole[:, :, :heads]
    return TokenStep(table, NewTokens(indices.flatten(), keys, values, first))
