"""Replaces SGLang's KV pool by the host pool; SGLang's allocator and radix tree do not change.

Read from sglang 0.5.23: `mem_cache/kv_cache_configurator.KVCacheConfigurator._resolve_kv_pool_class`. AROUND the
resolver rather than REPLACE on the pool class, because SGLang compares pool classes by identity.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from sglang_oasis.ops.summary import SUMMARY_FORMATS, SummaryFormat
from sglang_oasis.seams.calibration import calibration_of
from sglang_oasis.seams.flags import config_of, dense, enabled
from sglang_oasis.seams.seam import Seam
from sglang_oasis.serving.kv_pool import HostKVPool
from sglang_oasis.tier.calibration import Calibration


@functools.cache
def _summarising(fmt: SummaryFormat, calibration: Calibration | None, rank: int, ranks: int) -> type[HostKVPool]:
    # SGLang creates the pool from its class only, and the same arguments must always give the same class.
    scalings = None if calibration is None else calibration.scalings(rank, ranks)
    return type("SummarisingHostKVPool", (HostKVPool,), {"summary_format": fmt, "scalings": scalings})


def _pool_class(original: Callable[..., type], configurator: Any, *, kind: str, default: type) -> type:
    server_args = configurator.server_args
    if kind != "mha":
        return original(configurator, kind=kind, default=default)
    if enabled(server_args):
        from sglang.srt.runtime_context import get_parallel

        config, parallel = config_of(server_args, configurator.page_size), get_parallel()
        rank, ranks = parallel.attn_tp_rank, parallel.attn_tp_size
        if configurator.model_config.is_draft_model:
            config = config.of_draft_model()
        calibration = calibration_of(config, configurator.model_config, ranks)
        return _summarising(SUMMARY_FORMATS[config.summary_dtype], calibration, rank, ranks)
    return HostKVPool if dense(server_args) else original(configurator, kind=kind, default=default)


SEAMS = [Seam("mem_cache.kv_cache_configurator.KVCacheConfigurator._resolve_kv_pool_class", _pool_class, "AROUND")]
