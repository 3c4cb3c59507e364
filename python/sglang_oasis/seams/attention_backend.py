"""Registers the attention backend.

Read from sglang 0.5.23: `layers/attention/attention_registry.register_attention_backend`,
`arg_groups/choices.ATTENTION_BACKEND_CHOICES`, `mem_cache/memory_pool.ReqToTokenPool._aux_cache` (the target's row
observer, which a draft model's backend joins). The factory runs in the scheduler after the pools are built, which makes
it the place to check that every other seam took.
"""

from __future__ import annotations

import logging
from typing import Any

from sglang_oasis.config import DENSE_BACKEND_NAME, LookaheadKVConfig
from sglang_oasis.engine.device import DeviceAttentionBackend
from sglang_oasis.engine.host import LookaheadAttentionBackend
from sglang_oasis.engine.trace import SelectionTrace
from sglang_oasis.env import DebugEnv
from sglang_oasis.errors import LookaheadKVError
from sglang_oasis.kernels.cpu import native, overrides
from sglang_oasis.observability.metrics import MetricsExporter
from sglang_oasis.observability.report import start_up_summary
from sglang_oasis.seams import catalogue
from sglang_oasis.seams.kv_pool import HostKVPool
from sglang_oasis.seams.server_args import config_of, enabled
from sglang_oasis.seams.sizing import layout_of_runner, leftover_device_bytes
from sglang_oasis.serving.dense_backend import DenseAttentionBackend
from sglang_oasis.serving.lookahead_backend import BACKEND_NAME, TierBackend
from sglang_oasis.serving.row_observer import RowObserver
from sglang_oasis.tier.host_pool import HostPool
from sglang_oasis.tier.layout import TierLayout

logger = logging.getLogger(__name__)


def install() -> None:
    """Make the backend known under its name."""
    from sglang.srt.arg_groups.choices import ATTENTION_BACKEND_CHOICES
    from sglang.srt.layers.attention.attention_registry import register_attention_backend

    for name, create in ((BACKEND_NAME, _create), (DENSE_BACKEND_NAME, _create_dense)):
        register_attention_backend(name)(create)
        if name not in ATTENTION_BACKEND_CHOICES:
            ATTENTION_BACKEND_CHOICES.append(name)


def _create(runner: Any) -> TierBackend:
    from sglang.srt.runtime_context import get_serving

    catalogue.verify()
    if runner.device == "cpu":
        _load_kernels(runner)
    pool = runner.token_to_kv_pool
    if not enabled(runner.server_args) or not isinstance(pool, HostKVPool):
        raise LookaheadKVError(
            f"--attention-backend {BACKEND_NAME} works only on the host KV pool, found {type(pool).__name__}: "
            f"select it with --enable-lookahead-kv."
        )
    config = config_of(runner.server_args, runner.page_size)
    if runner.is_draft_worker:
        observer = runner.req_to_token_pool._aux_cache
        assert isinstance(observer, RowObserver), "the target's backend is created first"
        return LookaheadAttentionBackend(runner, config.of_draft_model(), layout_of_runner(runner), pool.host, observer)
    backend = _create_for(runner, config, layout_of_runner(runner), pool.host)
    labels = _rank_labels()
    if runner.server_args.enable_metrics:
        backend.exporter = MetricsExporter({"model_name": get_serving().served_model_name, **labels})
    folder = DebugEnv.read().trace_dir
    if folder is not None:
        several = runner.server_args.tp_size * runner.server_args.dp_size > 1
        backend.trace = SelectionTrace(folder / "_".join(labels.values()) if several else folder, backend.tier.layout)
    logger.info("%s", start_up_summary(backend))
    return backend


def _create_for(runner: Any, config: LookaheadKVConfig, layout: TierLayout, host: HostPool) -> TierBackend:
    if runner.device == "cuda":
        from sglang_oasis.kernels.cuda import overrides

        overrides.install()
    elif not DebugEnv.read().device_path:
        return LookaheadAttentionBackend(runner, config, layout, host)
    rows = runner.max_running_requests + 1
    return DeviceAttentionBackend(runner, config, layout, host, leftover_device_bytes(runner.server_args, layout, rows))


def _create_dense(runner: Any) -> DenseAttentionBackend:
    catalogue.verify()
    _load_kernels(runner)
    pool = runner.token_to_kv_pool
    if not isinstance(pool, HostKVPool):
        raise LookaheadKVError(
            f"--attention-backend {DENSE_BACKEND_NAME} works only on the paged host KV pool, found "
            f"{type(pool).__name__}: select it for attention as a whole, on a CPU."
        )
    return DenseAttentionBackend(runner, pool.host)


def _load_kernels(runner: Any) -> None:
    head_dim = runner.model_config.head_dim
    if native.load() is not None and not overrides.serves(head_dim):
        logger.warning("The CPU kernels do not serve heads of %d, plain torch does the work, much slower.", head_dim)


def _rank_labels() -> dict[str, str]:
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    return {"tp_rank": str(parallel.tp_rank), "dp_rank": str(parallel.dp_rank or 0)}
