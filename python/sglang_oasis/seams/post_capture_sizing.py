"""Stops SGLang from resizing the KV pool to the device memory that CUDA graphs leave, because it is in host memory.

Read from sglang 0.5.23: `arg_groups/overrides.post_capture_kv_sizing_planned`, which the memory heuristic of the
arguments and `model_runner_components/kv_pool_runtime.is_post_capture_kv_active` call. Not run on a GPU yet.
"""

from __future__ import annotations

from typing import Any

from sglang_oasis.seams.flags import enabled
from sglang_oasis.seams.seam import Seam


def _not_of_the_host_pool(result: bool, server_args: Any) -> bool:
    return result and not enabled(server_args)


SEAMS = [Seam("arg_groups.overrides.post_capture_kv_sizing_planned", _not_of_the_host_pool, "AFTER")]
