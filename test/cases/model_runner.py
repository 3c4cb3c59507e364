"""What stands for SGLang's model runner where a backend is made without a server."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool


class Runner(SimpleNamespace):
    """Its attributes, by which it is known, like SGLang's own."""

    __hash__ = object.__hash__


def make_runner(
    layers: Sequence[RadixAttention], *, rows: int, pool_tokens: int, context: int, dtype: torch.dtype, device: str,
    **others: Any,
) -> Any:  # fmt: skip
    """A runner of a model with these attention layers; `others` take the place of what is made here."""
    attributes: dict[str, Any] = {
        "model": torch.nn.ModuleList(layers),
        "device": device,
        "dtype": dtype,
        "is_draft_worker": False,
        "max_running_requests": rows,
        "max_total_num_tokens": pool_tokens,
        "model_config": SimpleNamespace(context_len=context),
        "token_to_kv_pool": SimpleNamespace(start_layer=0, dtype=dtype),
        "req_to_token_pool": ReqToTokenPool(rows, context, device, enable_memory_saver=False),
    }
    return Runner(**{**attributes, **others})
