"""The attention ops equal plain softmax attention over gathered keys."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sglang_oasis.ops.attention import dense_extend_attention, resident_decode_attention

HEADS, GROUP, DIM, BLOCK = 2, 3, 8, 4
SCALE = 0.3


def attend(query: Tensor, keys: Tensor, values: Tensor, first_position: int) -> Tensor:
    """query [T, H*G, D] at positions first_position.. attends causally to keys, values [L, H, D]; float64 loops."""
    out = torch.zeros_like(query, dtype=torch.float64)
    for t in range(query.shape[0]):
        visible = first_position + t + 1
        for head in range(HEADS * GROUP):
            scores = keys[:visible, head // GROUP].double() @ query[t, head].double() * SCALE
            out[t, head] = torch.softmax(scores, 0) @ values[:visible, head // GROUP].double()
    return out


@settings(max_examples=40, deadline=None)
@given(prefix=st.integers(0, 21), new=st.integers(1, 9), seed=st.integers(0, 999))
def test_extend_is_dense_causal_attention_over_prefix_and_new_tokens(prefix: int, new: int, seed: int) -> None:
    rng = torch.Generator().manual_seed(seed)
    keys, values = torch.randn((2, prefix + new, HEADS, DIM), generator=rng)
    query = torch.randn((new, HEADS * GROUP, DIM), generator=rng)
    pages = torch.full((-(-prefix // BLOCK), HEADS, 2, BLOCK, DIM), float("nan"))
    for position in range(prefix):
        page, offset = divmod(position, BLOCK)
        pages[page, :, 0, offset], pages[page, :, 1, offset] = keys[position], values[position]
    out = dense_extend_attention(query, keys[prefix:], values[prefix:], pages, prefix, SCALE)
    torch.testing.assert_close(out, attend(query, keys, values, prefix).float(), atol=1e-5, rtol=1e-5)


@settings(max_examples=40, deadline=None)
@given(lengths=st.lists(st.integers(1, 20), min_size=1, max_size=3), seed=st.integers(0, 999))
def test_decode_attends_to_exactly_the_given_slots(lengths: list[int], seed: int) -> None:
    rng = torch.Generator().manual_seed(seed)
    rows = torch.randperm(5, generator=rng)[: len(lengths)]
    blocks = torch.full((5, HEADS, 7, 2, BLOCK, DIM), float("nan"))
    query = torch.randn((len(lengths), HEADS * GROUP, DIM), generator=rng)
    slots, expected = [], []
    for i, length in enumerate(lengths):
        keys, values = torch.randn((2, length, HEADS, DIM), generator=rng)
        slots.append(torch.randperm(7, generator=rng)[: -(-length // BLOCK)])
        for position in range(length):
            block, offset = divmod(position, BLOCK)
            blocks[rows[i], :, slots[i][block], 0, offset] = keys[position]
            blocks[rows[i], :, slots[i][block], 1, offset] = values[position]
        expected.append(attend(query[i : i + 1], keys, values, length - 1))
    out = resident_decode_attention(query, blocks, rows, slots, lengths, SCALE)
    torch.testing.assert_close(out, torch.cat(expected).float(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_extend_keeps_the_dtype_of_the_query(dtype: torch.dtype) -> None:
    query = torch.randn(3, HEADS * GROUP, DIM, dtype=dtype)
    new = torch.randn(3, HEADS, DIM, dtype=dtype)
    pages = torch.randn(2, HEADS, 2, BLOCK, DIM, dtype=dtype)
    out = dense_extend_attention(query, new, new, pages, 6, SCALE)
    assert out.dtype == dtype
    exact = dense_extend_attention(query.float(), new.float(), new.float(), pages.float(), 6, SCALE)
    torch.testing.assert_close(out.float(), exact, atol=3e-2, rtol=3e-2)
