"""Stops fused rotary kernels (CUDA, HIP) from writing K and V into a token-major device pool, which does not exist.

Read from sglang 0.5.23: `models/utils.enable_fused_set_kv_buffer`. Not run on a GPU yet.
"""

from __future__ import annotations

from typing import Any

from sglang_oasis.seams.seam import Seam
from sglang_oasis.serving.kv_pool import HostKVPool


def _no_fused_write(result: bool, forward_batch: Any) -> bool:
    from sglang.srt.model_executor.forward_context import get_token_to_kv_pool

    return result and not isinstance(get_token_to_kv_pool(), HostKVPool)


SEAMS = [Seam("models.utils.enable_fused_set_kv_buffer", _no_fused_write, "AFTER")]
