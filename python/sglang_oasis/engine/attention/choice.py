"""Which kernels attend on a device: FlashInfer's paged ones where they serve, a Triton kernel elsewhere."""

from __future__ import annotations

from sglang_oasis.engine.attention import flashinfer, triton
from sglang_oasis.engine.attention.base import AttentionSetup, DeviceAttention


def choose_attention(setup: AttentionSetup) -> DeviceAttention:
    """FlashInfer, or Triton where FlashInfer is absent or does not know the head size or the dtype."""
    if flashinfer.serves(setup.layout, setup.dtype):
        return flashinfer.make(setup)
    return triton.make(setup)
