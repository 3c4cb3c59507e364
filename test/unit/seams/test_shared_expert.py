"""The shared expert's gate on a CPU: a sigmoid per token, from the token's own hidden state."""

from __future__ import annotations

import math
from typing import NoReturn

import pytest
import torch

from sglang_oasis.seams.shared_expert import _add_gated, _gated


def kernel(*tensors: torch.Tensor) -> NoReturn:
    raise AssertionError("there is no Triton on a CPU")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gate_equals_loops(dtype: torch.dtype) -> None:
    hidden, shared, routed = torch.randn(3, 5, 8, generator=torch.Generator().manual_seed(0)).to(dtype)
    weight = torch.linspace(-1, 1, 8, dtype=dtype)
    expected = torch.empty(5, 8)
    for token in range(5):
        score = sum(float(h) * float(w) for h, w in zip(hidden[token], weight, strict=True))
        expected[token] = shared[token].float() / (1 + math.exp(-score))
    tolerance = {"atol": 1e-6, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 1e-2, "rtol": 1e-2}
    torch.testing.assert_close(_gated(kernel, hidden, weight, shared).float(), expected, **tolerance)
    total = routed.clone()
    _add_gated(kernel, hidden, weight, shared, total)
    torch.testing.assert_close(total.float(), routed.float() + expected, **tolerance)
