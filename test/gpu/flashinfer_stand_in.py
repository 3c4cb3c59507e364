"""FlashInfer's paged wrappers by this project's reference, so that their tests can be rehearsed without a GPU.

Of FlashInfer 0.7.2: what `plan` is given on the host is fixed until the next one; indices and the lengths of last pages
are read from their buffers whenever `run` runs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sglang_oasis.ops.attention import paged_attention


class _Wrapper:
    def __init__(self, workspace: Tensor, kv_layout: str, **options: Any) -> None:
        self._indices = options.get("paged_kv_indices_buffer")
        self._last_page_len = options.get("paged_kv_last_page_len_buffer")

    def reset_workspace_buffer(self, workspace: Tensor, numbers: Tensor) -> None:
        assert workspace.dtype == numbers.dtype == torch.uint8

    def _plan(self, indptr: Tensor, indices: Tensor, last_page_len: Tensor, scale: float) -> None:
        self._indptr, self._scale = indptr.clone(), scale
        if self._indices is None:
            self._indices, self._last_page_len = indices, last_page_len
        else:
            self._indices[: len(indices)] = indices.clone()
            self._last_page_len.copy_(last_page_len)

    def _attend(self, query: Tensor, pages: Tensor, starts: Tensor) -> Tensor:
        """pages [N, H, 2, B, D]."""
        counts = self._indptr.diff()
        slots = torch.zeros(len(counts), int(counts.max()), dtype=torch.int32)
        for i, (first, count) in enumerate(zip(self._indptr.tolist(), counts.tolist(), strict=False)):
            slots[i, :count] = self._indices[first : first + count]
        lengths = ((counts - 1) * pages.shape[-2] + self._last_page_len).int()
        return paged_attention.reference(query, pages, slots, slots, lengths, starts, self._scale)


class BatchDecodeWithPagedKVCacheWrapper(_Wrapper):
    def plan(
        self, indptr: Tensor, indices: Tensor, last_page_len: Tensor, num_qo_heads: int, num_kv_heads: int,
        head_dim: int, page_size: int, *, sm_scale: float, q_len_per_req: int, **options: Any,
    ) -> None:  # fmt: skip
        self._plan(indptr, indices, last_page_len, sm_scale)
        self._starts = q_len_per_req * torch.arange(len(indptr), dtype=torch.int32)

    def run(self, query: Tensor, pages: Tensor) -> Tensor:
        """pages [N, 2, B, H, D]: layout NHD."""
        return self._attend(query, pages.permute(0, 3, 1, 2, 4), self._starts)


class BatchPrefillWithPagedKVCacheWrapper(_Wrapper):
    def plan(
        self, qo_indptr: Tensor, indptr: Tensor, indices: Tensor, last_page_len: Tensor, num_qo_heads: int,
        num_kv_heads: int, head_dim: int, page_size: int, *, sm_scale: float, **options: Any,
    ) -> None:  # fmt: skip
        assert options["causal"]
        self._indices = None
        self._plan(indptr, indices, last_page_len, sm_scale)
        self._starts = qo_indptr

    def run(self, query: Tensor, halves: tuple[Tensor, Tensor]) -> Tensor:
        """Each half [N, H, B, D]: layout HND."""
        return self._attend(query, torch.stack(halves, dim=2), self._starts)
