"""SGLang's KV pool, implemented on the host pool, so that its index space is host memory.

Read from sglang 0.5.23: `mem_cache/memory_pool.MHATokenToKVPool`. The overrides below are all methods that access the
stock pool's buffers; a new one upstream would find no `k_buffer` of the stock shape and must be overridden here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from sglang.srt.mem_cache.memory_pool import KvBufferDesc, MHATokenToKVPool
from torch import Tensor

from sglang_oasis.ops.summary import SummaryFormat
from sglang_oasis.tier.host_memory.pinned import pinned_allocator
from sglang_oasis.tier.host_pool import HostPool, pageable


class HostKVPool(MHATokenToKVPool):
    """The interface of the stock MHA pool on a head-major, paged pool in host memory.

    Attributes:
        host: the pool of record.
        summary_format: how the pool summarises completed pages, None for no summaries.
        scalings: what the summaries of each layer are relative to, None for nothing.
    """

    host: HostPool
    summary_format: SummaryFormat | None = None
    scalings: Sequence[Tensor] | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # The tiled device copy assumes token rows on the device; this layout label avoids SGLang's HND branches.
        super().__init__(*args, **{**kwargs, "enable_kv_cache_copy": False, "kv_cache_layout": "page_major"})

    def _create_buffers(self) -> None:
        slots = self.size + self.page_size  # an extra page for the writes of padding tokens
        device = torch.device(self.device)
        self.host = HostPool(
            num_pages=slots // self.page_size,
            num_layers=self.layer_num,
            kv_heads=self.head_num,
            block_size=self.page_size,
            head_dim=self.head_dim,
            dtype=self.store_dtype,
            summary_format=self.summary_format,
            scalings=self.scalings,
            allocate=pinned_allocator(device) if device.type == "cuda" else pageable,
        )
        # Views [pages, H, B, D], for generic code that inspects the buffers and expects tensors.
        self.k_buffer = [kv[:, :, 0] for kv in self.host.kv]
        self.v_buffer = [kv[:, :, 1] for kv in self.host.kv]
        self._kv_buffer_descs = self._build_kv_buffer_descs()
        self._init_data_ptrs_and_strides()

    def _build_kv_buffer_descs(self) -> list[KvBufferDesc]:
        return [
            KvBufferDesc(f"kv{i}", tuple(kv.shape), row_bytes=kv[0].nbytes, tokens_per_row=self.page_size)
            for i, kv in enumerate(self.host.kv)
        ]

    def _pd_registerable_tensors(self) -> list[Tensor]:
        return self.host.kv

    def get_kv_size_bytes(self) -> tuple[int, int]:
        half = sum(kv.nbytes for kv in self.host.kv) // 2
        return half, half

    def _clear_buffers(self) -> None:
        del self.host, self.k_buffer, self.v_buffer

    def _store_kv_layer(self, layer_idx: int, loc: Tensor, cache_k: Tensor, cache_v: Tensor) -> None:
        self.host.write(layer_idx, loc, cache_k, cache_v)

    def _get_key_buffer(self, layer_id: int) -> NoReturn:
        raise NotImplementedError(
            "The host KV pool has no token-major key buffer: use an attention backend of sglang-oasis."
        )

    _get_value_buffer = _get_key_buffer

    def move_kv_cache(self, tgt_loc: Tensor, src_loc: Tensor) -> None:
        self.host.move(tgt_loc, src_loc)

    def get_cpu_copy(self, indices: Tensor, mamba_indices: Any = None, req_pool_index: Any = None) -> list[Tensor]:
        return [self.host.read(layer, indices) for layer in range(self.layer_num)]

    def load_cpu_copy(
        self, kv_cache_cpu: list[Tensor], indices: Tensor, mamba_indices: Any = None, req_pool_index: Any = None
    ) -> None:
        for layer, tokens in enumerate(kv_cache_cpu):
            self.host.write(layer, indices, tokens[:, :, 0], tokens[:, :, 1])
        pages = torch.unique(self.host.locate(indices)[0])
        for layer in range(self.layer_num):
            self.host.summarise(layer, pages)
