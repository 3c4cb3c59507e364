"""Which kernels attend on a device: FlashInfer's paged ones where they serve, a Triton kernel elsewhere."""

from __future__ import annotations

from sglang_oasis.attention import flashinfer_attention, triton_attention
from sglang_oasis.attention.device_attention import AttentionSetup, DeviceAttention


def choose_attention(setup: AttentionSetup) -> DeviceAttention:
    """FlashInfer, or Triton where FlashInfer is absent or does not know the head size or the dtype."""
    if flashinfer_attention.serves(setup.layout, setup.dtype):
        return flashinfer_attention.make(setup)
    return triton_attention.make(setup)
