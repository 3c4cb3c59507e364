"""The references of paged attention and of the stores equal plain loops; see test_cpu_kernels.py for the kernels."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sglang_oasis.ops.attention import paged_attention
from sglang_oasis.ops.tokens import store_tokens

HEADS, GROUP, DIM, BLOCK, SLOTS = 2, 3, 8, 4, 12
SCALE = 0.3
UNUSED = -(10**6)
"""In a slot table beyond a sequence's tokens: an index nobody may follow."""

LAYOUTS = pytest.mark.parametrize("by_row", [True, False], ids=["resident", "pages"])


def attend(query: Tensor, keys: Tensor, values: Tensor, first_position: int) -> Tensor:
    """query [T, H*G, D] at positions first_position.. attends causally to keys, values [L, H, D]; float64 loops."""
    out = torch.zeros_like(query, dtype=torch.float64)
    for t in range(query.shape[0]):
        visible = first_position + t + 1
        for head in range(HEADS * GROUP):
            scores = keys[:visible, head // GROUP].double() @ query[t, head].double() * SCALE
            out[t, head] = torch.softmax(scores, 0) @ values[:visible, head // GROUP].double()
    return out


def starts_of(counts: list[int]) -> Tensor:
    return torch.tensor([0, *counts]).cumsum(0).int()


@LAYOUTS
@settings(max_examples=40, deadline=None)
@given(
    sequences=st.lists(st.tuples(st.integers(0, 21), st.integers(0, 9)), min_size=1, max_size=3),
    seed=st.integers(0, 999),
)
def test_query_tokens_attend_causally_to_exactly_the_slots_of_their_sequence(
    by_row: bool, sequences: list[tuple[int, int]], seed: int
) -> None:
    """A sequence is a prefix and its query tokens, in slots that are anywhere; whatever else the slots hold is NaN."""
    rng = torch.Generator().manual_seed(seed)
    rows = torch.randperm(5, generator=rng)[: len(sequences)]
    shape = (5, HEADS, SLOTS, 2, BLOCK, DIM) if by_row else (len(sequences) * SLOTS, HEADS, 2, BLOCK, DIM)
    blocks = torch.full(shape, float("nan"))
    free = torch.randperm(len(sequences) * SLOTS, generator=rng).tolist()
    slots = torch.full((len(sequences), SLOTS), UNUSED, dtype=torch.int32)
    queries, expected = [], []
    for i, (prefix, new) in enumerate(sequences):
        length = prefix + new
        keys, values = torch.randn((2, length, HEADS, DIM), generator=rng)
        used = -(-length // BLOCK)
        places = torch.randperm(SLOTS, generator=rng)[:used].tolist() if by_row else [free.pop() for _ in range(used)]
        slots[i, :used] = torch.tensor(places)
        for position in range(length):
            place, offset = places[position // BLOCK], position % BLOCK
            chunk = blocks[rows[i], :, place] if by_row else blocks[place]
            chunk[:, 0, offset], chunk[:, 1, offset] = keys[position], values[position]
        queries.append(torch.randn((new, HEADS * GROUP, DIM), generator=rng))
        expected.append(attend(queries[i], keys, values, prefix))
    lengths = torch.tensor([prefix + new for prefix, new in sequences], dtype=torch.int32)
    starts = starts_of([new for _, new in sequences])
    out = paged_attention.reference(torch.cat(queries), blocks, rows, slots, lengths, starts, SCALE)
    torch.testing.assert_close(out, torch.cat(expected).float(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_attention_keeps_the_dtype_of_the_query(dtype: torch.dtype) -> None:
    query = torch.randn(3, HEADS * GROUP, DIM, dtype=dtype)
    pages = torch.randn(3, HEADS, 2, BLOCK, DIM, dtype=dtype)
    where = torch.zeros(1, dtype=torch.int64), torch.tensor([[2, 0, 1]]).int(), torch.tensor([9]).int(), starts_of([3])
    out = paged_attention.reference(query, pages, *where, SCALE)
    assert out.dtype == dtype
    exact = paged_attention.reference(query.float(), pages.float(), *where, SCALE)
    torch.testing.assert_close(out.float(), exact, atol=3e-2, rtol=3e-2)


@LAYOUTS
@settings(max_examples=30, deadline=None)
@given(tokens=st.integers(0, 9), seed=st.integers(0, 999))
def test_stored_tokens_are_where_they_belong_and_nothing_else_changes(by_row: bool, tokens: int, seed: int) -> None:
    rng = torch.Generator().manual_seed(seed)
    keys, values = torch.randn((2, tokens, HEADS, DIM), generator=rng)
    blocks = torch.zeros((3, HEADS, SLOTS, 2, BLOCK, DIM) if by_row else (SLOTS, HEADS, 2, BLOCK, DIM)).bfloat16()
    expected = blocks.clone()
    rows = torch.randint(3, (tokens,), generator=rng)
    positions = torch.randperm(SLOTS * BLOCK, generator=rng)[:tokens]
    store_tokens.reference(blocks, rows if by_row else None, positions, keys, values)
    for t, position in enumerate(positions.tolist()):
        chunk = expected[rows[t], :, position // BLOCK] if by_row else expected[position // BLOCK]
        for head in range(HEADS):
            chunk[head, 0, position % BLOCK] = keys[t, head].bfloat16()
            chunk[head, 1, position % BLOCK] = values[t, head].bfloat16()
    assert torch.equal(blocks, expected)
