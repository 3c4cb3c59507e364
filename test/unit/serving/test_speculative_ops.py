"""The CPU stand-ins for SGLang's speculative ops do what the Triton kernels do, run by Triton's interpreter."""

from __future__ import annotations

import importlib
import sys
import types
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang.kernels.ops.speculative import cache_locs, eagle, gather_spec_extras, spec_tree
from sglang.srt.mem_cache import allocation
from torch import Tensor

from sglang_oasis.serving.cpu_platform import speculative as ops

FEW = settings(max_examples=20, deadline=None)  # the interpreter is slow
SEEDS = st.integers(0, 10_000)
BATCHES = st.integers(1, 4)
CHAINS = st.integers(2, 6)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


class Table:
    """SGLang's request table with random rows, and a span of columns for each."""

    def __init__(self, batch: int, longest: int, seed: int) -> None:
        rng = generator(seed)
        self.req_to_token = torch.randint(0, 10**6, (6, 64), generator=rng, dtype=torch.int32)
        self.rows = torch.randperm(6, generator=rng)[:batch]
        self.starts = torch.randint(0, 40, (batch,), generator=rng)
        self.counts = torch.randint(0, longest + 1, (batch,), generator=rng)
        self.ends = self.starts + self.counts


@FEW
@given(batch=BATCHES, seed=SEEDS)
def test_extend_cache_locs(batch: int, seed: int) -> None:
    table = Table(batch, 12, seed)
    total = int(table.counts.sum())
    expected = torch.zeros(total, dtype=torch.int64)
    cache_locs.assign_extend_cache_locs[(batch,)](
        table.rows, table.req_to_token, table.starts, table.ends, expected, table.req_to_token.shape[1], 8
    )
    got = ops.extend_cache_locs(
        req_pool_indices=table.rows,
        req_to_token=table.req_to_token,
        start_offset=table.starts,
        end_offset=table.ends,
        batch_size=batch,
        draft_token_num=0,
        device="cpu",
    )
    assert torch.equal(got, expected)


@FEW
@given(batch=BATCHES, seed=SEEDS)
def test_assign_req_to_token_pool(batch: int, seed: int) -> None:
    table, twin = Table(batch, 12, seed), Table(batch, 12, seed)
    values = torch.arange(int(table.counts.sum()) + 3)
    allocation.assign_req_to_token_pool[(batch,)](
        twin.rows, twin.req_to_token, twin.starts, twin.ends, values, twin.req_to_token.shape[1], 8
    )
    ops.assign_req_to_token_pool(table.rows, table.req_to_token, table.starts, table.ends, values, batch)
    assert torch.equal(table.req_to_token, twin.req_to_token)


@FEW
@given(batch=BATCHES, columns=st.integers(1, 5), seed=SEEDS)
def test_assign_draft_cache_locs_contiguous(batch: int, columns: int, seed: int) -> None:
    table = Table(batch, 12, seed)
    got, expected = torch.zeros(2, batch * columns, dtype=torch.int64)
    cache_locs.assign_draft_cache_locs_contiguous[(batch,)](
        table.rows, table.req_to_token, table.starts, expected, table.req_to_token.shape[1], 1, columns
    )
    ops.assign_draft_cache_locs_contiguous(table.rows, table.req_to_token, table.starts, got, 1, columns)
    assert torch.equal(got, expected)


@FEW
@given(batch=BATCHES, width=CHAINS, seed=SEEDS)
def test_packing_of_accepted_places(batch: int, width: int, seed: int) -> None:
    rng = generator(seed)
    places = torch.randint(0, 10**6, (batch * width,), generator=rng)
    accepted = torch.randint(1, width + 1, (batch,), generator=rng)
    got, expected = torch.zeros(2, batch * width, dtype=torch.int64)
    rows, none = torch.arange(batch), torch.zeros_like(accepted)
    cache_locs.assign_extend_cache_locs[(batch,)](rows, places.view(batch, width), none, accepted, expected, width, 8)
    ops.fill_front_out_cache_loc(accepted, places, got)
    assert torch.equal(got, expected)

    index = torch.arange(batch * width).view(batch, width)
    index = torch.where(torch.arange(width) < accepted[:, None], index, -1).int()
    got, expected = torch.zeros(2, batch * width, dtype=torch.int64)
    eagle.fill_accept_out_cache_loc[(batch * width,)](index, places, expected, 32)
    ops.fill_accept_out_cache_loc(index, places, got, batch * width)
    assert torch.equal(got, expected)

    tokens = torch.randint(0, 100, (batch, width), generator=rng, dtype=torch.int32)
    got, expected = torch.zeros(2, batch, dtype=torch.int32)
    eagle.fill_bonus_tokens[(batch,)](tokens, accepted, expected, width)
    ops.fill_bonus_tokens(tokens, accepted, got, width, batch)
    assert torch.equal(got, expected)


@FEW
@given(batch=BATCHES, hidden=st.sampled_from([None, 5]), seed=SEEDS)
def test_gather_spec_extras(batch: int, hidden: int | None, seed: int) -> None:
    rng = generator(seed)
    shapes = ((6, 2), (6, 2), (6,), *(() if hidden is None else ((6, hidden),)))
    buffers = [torch.randn(shape, generator=rng) for shape in shapes]
    buffers += [None] * (4 - len(buffers))  # type: ignore[list-item]
    indices = torch.randint(0, 6, (batch,), generator=rng)
    expected = gather_spec_extras.gather_spec_extras(indices, *buffers)
    got = ops.gather_spec_extras(indices, *buffers)
    assert all(a is b or torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def chain_arguments(batch: int, width: int, mode: int, seed: int) -> list[Any]:
    """What SGLang hands over for chains of `width` tokens; fresh outputs each time."""
    lengths = torch.randint(1, 20, (batch,), generator=generator(seed))
    parents = torch.arange(-1, width - 2).expand(batch, -1).contiguous()
    scores = torch.arange(width - 1).expand(batch, -1).contiguous()
    cells = (int(lengths.sum()) if mode == ops.FULL_MASK else 0) * width + batch * width * width
    links = [torch.full((batch, width), -1) for _ in range(3)]
    mask, positions = torch.ones(cells, dtype=torch.bool), torch.zeros(batch * width, dtype=torch.int64)
    return [parents, scores, lengths, mask, positions, *links, 1, width - 1, width, mode]


@FEW
@given(batch=BATCHES, width=CHAINS, mode=st.sampled_from([0, 1]), seed=SEEDS)
def test_build_tree(batch: int, width: int, mode: int, seed: int) -> None:
    got, expected = chain_arguments(batch, width, mode, seed), chain_arguments(batch, width, mode, seed)
    spec_tree.sgl_build_tree_kernel_triton(*expected[:-1], spec_tree.TreeMaskMode(mode))
    ops.build_tree(*got)
    assert all(torch.equal(a, b) for a, b in zip(got[3:8], expected[3:8], strict=True))


def test_trees_are_refused() -> None:
    arguments = chain_arguments(2, 3, 0, 0)
    arguments[8] = 2
    with pytest.raises(NotImplementedError, match="not trees of 2 branches"):
        ops.build_tree(*arguments)


def reconstruct_kernel() -> Any:
    """SGLang's Triton kernel; its module cannot be imported without the compiled kernels, but for this."""
    name = "sgl_kernel.speculative"
    with pytest.MonkeyPatch.context() as patch:
        for part in ("sgl_kernel", name):
            patch.setitem(sys.modules, part, types.ModuleType(part))
        sys.modules[name].reconstruct_indices_from_tree_mask = None  # type: ignore[attr-defined]
        patch.delitem(sys.modules, "sglang.kernels.ops.speculative.reconstruct_tree", raising=False)
        module = importlib.import_module("sglang.kernels.ops.speculative.reconstruct_tree")
        patch.setattr(module, "_is_xpu", True)
        return lambda *arguments: _with(module, "_is_xpu", True, arguments)


def _with(module: Any, name: str, value: Any, arguments: Any) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, name, value)
        module.reconstruct_indices_from_tree_mask_func(*arguments)


def tree_mask(batch: int, width: int, chain: bool, seed: int) -> Tensor:
    """Masks of random trees, or of chains: [batch, width, width] bool."""
    rng = generator(seed)
    mask = torch.eye(width, dtype=torch.bool).repeat(batch, 1, 1)
    for b in range(batch):
        for i in range(1, width):
            parent = i - 1 if chain else int(torch.randint(0, i, (1,), generator=rng))
            mask[b, i] |= mask[b, parent]
    return mask


@FEW
@given(batch=BATCHES, width=CHAINS, chain=st.booleans(), seed=SEEDS)
def test_reconstruct_tree(batch: int, width: int, chain: bool, seed: int) -> None:
    kernel = reconstruct_kernel()
    mask = tree_mask(batch, width, chain, seed)
    lengths = torch.randint(1, 20, (batch,), generator=generator(seed))

    def outputs() -> list[Tensor]:
        return [torch.zeros(batch * width, dtype=torch.int64), *(torch.full((batch, width), -9) for _ in range(3))]

    got, expected = outputs(), outputs()
    kernel(mask.flatten(), lengths, *expected, batch, width)
    ops.reconstruct_indices_from_tree_mask(mask.flatten(), lengths, *got, batch, width)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


@FEW
@given(batch=BATCHES, width=CHAINS, chain=st.booleans(), tokens=st.integers(1, 3), seed=SEEDS)
def test_verify_tree_greedy(batch: int, width: int, chain: bool, tokens: int, seed: int) -> None:
    """Few token ids, so that many drafts are right."""
    rng = generator(seed)
    links = [torch.zeros(batch * width, dtype=torch.int64), *(torch.full((batch, width), -1) for _ in range(3))]
    mask = tree_mask(batch, width, chain, seed)
    ops.reconstruct_indices_from_tree_mask(mask.flatten(), torch.zeros(batch).long(), *links, batch, width)
    candidates, target = torch.randint(0, tokens, (2, batch, width), generator=rng)

    def outputs() -> list[Tensor]:
        accept_index = torch.full((batch, width), -1, dtype=torch.int32)
        return [torch.zeros(batch * width, dtype=torch.int32), accept_index, torch.zeros(batch, dtype=torch.int32)]

    got, expected = outputs(), outputs()
    spec_tree.verify_tree_greedy_triton(*expected, candidates, *links[1:], target)
    ops.verify_tree_greedy(*got, candidates, *links[1:], target)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
