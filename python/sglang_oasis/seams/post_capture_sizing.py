"""Keeps SGLang from resizing the KV pool to what CUDA graphs leave of the device's memory: the pool is host memory.

Read from sglang 0.5.23: `arg_groups/overrides.post_capture_kv_sizing_planned`, which is asked by the memory heuristic
of the arguments and by `model_runner_components/kv_pool_runtime.is_post_capture_kv_active`. Not run on a GPU yet.
"""

from __future__ import annotations

from typing import Any

from sglang_oasis.seams.flags import enabled
from sglang_oasis.seams.seam import Seam


def _not_of_the_host_pool(result: bool, server_args: Any) -> bool:
    return result and not enabled(server_args)


SEAMS = [Seam("arg_groups.overrides.post_capture_kv_sizing_planned", _not_of_the_host_pool, "AFTER")]
