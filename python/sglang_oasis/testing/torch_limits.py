"""Limits torch to an instruction set that is narrower than the machine's."""

from __future__ import annotations

TORCH_LIMITS = {
    "baseline": {"ATEN_CPU_CAPABILITY": "default", "MKL_ENABLE_INSTRUCTIONS": "SSE4_2", "ONEDNN_MAX_CPU_ISA": "SSE41"},
    "avx2": {"ATEN_CPU_CAPABILITY": "avx2", "MKL_ENABLE_INSTRUCTIONS": "AVX2", "ONEDNN_MAX_CPU_ISA": "AVX2"},
}
"""Environment variables that limit torch to an instruction set; for wider sets torch uses what the machine has."""
