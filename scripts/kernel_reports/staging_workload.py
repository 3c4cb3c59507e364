"""Shapes of one layer's prefill through the staging buffer, and the resulting kernel launches."""

from __future__ import annotations

import torch
from torch import Tensor

from scripts.kernel_reports.workload import Workload
from sglang_oasis.kernels.triton import staging as launches
from sglang_oasis.kernels.triton.launches import Launch
from sglang_oasis.ops.staging import PageCopies, TokenRuns

NEW_TOKENS = 8192
"""SGLang's prefill chunk on a large GPU."""


def launches_of(load: Workload, device: str = "meta") -> list[Launch]:
    """Return the launch of every staging kernel for one chunk at the end of a context; tensors are not initialised.

    Args:
        load: heads, block size, context and element type; one request is prefilled.
        device: device of the tensors.
    """
    pages, new_pages = load.blocks, NEW_TOKENS // load.block_size

    def kv(count: int) -> Tensor:
        shape = count, load.heads, 2, load.block_size, load.head_dim
        return torch.empty(shape, dtype=load.dtype, device=device)

    def table(count: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(count, dtype=dtype, device=device)

    staging, arena, host_kv = kv(pages), kv(pages // 4), kv(4 * pages)
    copies = PageCopies(*(table(pages - new_pages) for _ in range(4)))
    runs = TokenRuns(*(table(new_pages) for _ in range(4)))
    shape = NEW_TOKENS, (load.group + 2) * load.heads, load.head_dim
    projected = torch.empty(shape, dtype=load.dtype, device=device)
    _, keys, values = projected.split([load.group * load.heads, load.heads, load.heads], dim=1)
    tokens = table(NEW_TOKENS, torch.int64)
    return [
        launches.stage_pages_launch(staging, arena, host_kv, copies),
        launches.write_back_launch(staging, host_kv, runs),
        launches.store_tokens_launch(staging, tokens, keys, values),
        launches.forget_pages_launch(table(pages // 4), tokens, load.block_size),
    ]
