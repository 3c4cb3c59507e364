"""A kernel that reads pinned memory by address and writes device memory, to measure the link's highest rate."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

WORDS = 1024
"""64-bit words per program and turn: 8 KiB, a chunk of K and V."""
PROGRAMS = 132 * 4


@triton.jit
def copy_words(source, target, count, WORDS: tl.constexpr):
    for start in range(tl.program_id(0) * WORDS, count, tl.num_programs(0) * WORDS):
        word = start + tl.arange(0, WORDS)
        tl.store(target + word, tl.load(source + word, mask=word < count), mask=word < count)


def read(target: Tensor, source: Tensor) -> None:
    """Copy contiguous memory whose size is a multiple of 8 bytes."""
    source, target = source.view(torch.int64), target.view(torch.int64)
    copy_words[(PROGRAMS,)](source, target, source.numel(), WORDS=WORDS)
