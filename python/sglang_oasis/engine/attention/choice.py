"""Chooses a device's attention kernels: FlashInfer's paged kernels where they can serve, else a Triton kernel."""

from __future__ import annotations

from sglang_oasis.engine.attention import flashinfer, triton
from sglang_oasis.engine.attention.base import AttentionSetup, DeviceAttention


def choose_attention(setup: AttentionSetup) -> DeviceAttention:
    """Return FlashInfer's kernels, or Triton's where FlashInfer is absent or lacks the head size or the dtype."""
    if flashinfer.serves(setup.layout, setup.dtype):
        return flashinfer.make(setup)
    return triton.make(setup)
