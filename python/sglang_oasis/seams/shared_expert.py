"""Computes the gate of a shared expert on a CPU; SGLang has only a Triton kernel for it (Qwen2-MoE and similar models).

Read from sglang 0.5.23: `kernels/ops/elementwise/elementwise.fused_gate_sigmoid_mul_add` and `.fused_gate_sigmoid_mul`,
`models/qwen2_moe.py`. AROUND: other devices keep the kernel. Remove this when upstream has a path in torch.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from sglang_oasis.seams.seam import Seam


def _gated(
    original: Callable[..., Tensor], hidden_states: Tensor, gate_weight: Tensor, shared_output: Tensor
) -> Tensor:
    """Gate: hidden_states [T, D], gate_weight [D], shared_output [T, D] -> the gated shared_output [T, D]."""
    if hidden_states.device.type != "cpu":
        return original(hidden_states, gate_weight, shared_output)
    gate = torch.sigmoid(hidden_states.float() @ gate_weight.float())
    return (gate[:, None] * shared_output).to(shared_output.dtype)


def _add_gated(
    original: Callable[..., None],
    hidden_states: Tensor,
    gate_weight: Tensor,
    shared_output: Tensor,
    final_hidden_states: Tensor,
) -> None:
    """Add the gated shared_output to final_hidden_states [T, D] in place."""
    if hidden_states.device.type != "cpu":
        original(hidden_states, gate_weight, shared_output, final_hidden_states)
        return
    gate = torch.sigmoid(hidden_states.float() @ gate_weight.float())
    final_hidden_states.copy_(final_hidden_states + gate[:, None] * shared_output)


_MODULE = "sglang.kernels.ops.elementwise.elementwise"
SEAMS = [
    Seam(f"{_MODULE}.fused_gate_sigmoid_mul", _gated, "AROUND"),
    Seam(f"{_MODULE}.fused_gate_sigmoid_mul_add", _add_gated, "AROUND"),
]
