"""Puts the CUDA implementations of the ops in the place of the references: Triton's, and C++ where it is faster."""

from __future__ import annotations

from sglang_oasis.ops import staging_triton, triton_ops

IMPLEMENTATIONS = (triton_ops, staging_triton)


def install() -> None:
    """Done by importing the modules above; a name for what that import is for."""
