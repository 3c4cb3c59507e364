"""Registers the attention backend.

Read from sglang 0.5.23: `layers/attention/attention_registry.register_attention_backend`,
`arg_groups/choices.ATTENTION_BACKEND_CHOICES`, `mem_cache/memory_pool.ReqToTokenPool._aux_cache` (the target's row
observer, which a draft model's backend joins). The factories run in the scheduler after the pools are built, so they
check that every other seam is installed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from sglang_oasis.config import BACKEND_NAME, DENSE_BACKEND_NAME
from sglang_oasis.engine.trace import SelectionTrace
from sglang_oasis.env import DebugEnv
from sglang_oasis.errors import LookaheadKVError
from sglang_oasis.kernels.cpu import native, overrides
from sglang_oasis.observability.metrics import MetricsExporter
from sglang_oasis.observability.report import start_up_summary
from sglang_oasis.seams.flags import config_of, enabled
from sglang_oasis.seams.sizing import layout_of_runner, leftover_device_bytes
from sglang_oasis.serving.dense_backend import DenseAttentionBackend
from sglang_oasis.serving.engines import make_engine
from sglang_oasis.serving.kv_pool import HostKVPool
from sglang_oasis.serving.lookahead_backend import LookaheadBackend
from sglang_oasis.serving.row_observer import RowObserver
from sglang_oasis.tier.host_pool import HostPool

logger = logging.getLogger(__name__)


def install(verify: Callable[[], None]) -> None:
    """Register the backends under their names; `verify` is called before a backend is created."""
    from sglang.srt.arg_groups.choices import ATTENTION_BACKEND_CHOICES
    from sglang.srt.layers.attention.attention_registry import register_attention_backend

    for name, create in ((BACKEND_NAME, _create), (DENSE_BACKEND_NAME, _create_dense)):
        register_attention_backend(name)(_verified(create, verify))
        if name not in ATTENTION_BACKEND_CHOICES:
            ATTENTION_BACKEND_CHOICES.append(name)


def _verified(create: Callable[[Any], Any], verify: Callable[[], None]) -> Callable[[Any], Any]:
    def verified(runner: Any) -> Any:
        verify()
        return create(runner)

    return verified


def _create(runner: Any) -> LookaheadBackend:
    if runner.device == "cpu":
        _load_kernels(runner)
    host = _host_pool(runner, BACKEND_NAME, "select it with --enable-lookahead-kv", enabled(runner.server_args))
    config, layout = config_of(runner.server_args, runner.page_size), layout_of_runner(runner)
    if runner.is_draft_worker:
        observer = runner.req_to_token_pool._aux_cache
        assert isinstance(observer, RowObserver), "the target's backend is created first"
        return LookaheadBackend(runner, make_engine(runner, config.of_draft_model(), layout, host, 0), observer)
    rows = runner.max_running_requests + 1
    engine = make_engine(runner, config, layout, host, leftover_device_bytes(layout, rows))
    engine.observer = _trace(runner)
    backend = LookaheadBackend(runner, engine, exporter=_exporter(runner))
    logger.info("%s", start_up_summary(engine.snapshot(), runner.dtype))
    return backend


def _create_dense(runner: Any) -> DenseAttentionBackend:
    _load_kernels(runner)
    return DenseAttentionBackend(
        runner, _host_pool(runner, DENSE_BACKEND_NAME, "use it for both prefill and decode, on a CPU")
    )


def _host_pool(runner: Any, name: str, remedy: str, asked_for: bool = True) -> HostPool:
    pool = runner.token_to_kv_pool
    if not asked_for or not isinstance(pool, HostKVPool):
        raise LookaheadKVError(
            f"--attention-backend {name} needs the host KV pool, found {type(pool).__name__}: {remedy}."
        )
    return pool.host


def _exporter(runner: Any) -> MetricsExporter | None:
    from sglang.srt.runtime_context import get_serving

    if not runner.server_args.enable_metrics:
        return None
    return MetricsExporter({"model_name": get_serving().served_model_name, **_rank_labels()})


def _trace(runner: Any) -> SelectionTrace | None:
    folder = DebugEnv.read().trace_dir
    if folder is None:
        return None
    several = runner.server_args.tp_size * runner.server_args.dp_size > 1
    return SelectionTrace(folder / "_".join(_rank_labels().values()) if several else folder, layout_of_runner(runner))


def _load_kernels(runner: Any) -> None:
    head_dim = runner.model_config.head_dim
    if native.load() is not None and not overrides.serves(head_dim):
        logger.warning("The CPU kernels do not support heads of %d: using plain torch, which is much slower.", head_dim)


def _rank_labels() -> dict[str, str]:
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    return {"tp_rank": str(parallel.tp_rank), "dp_rank": str(parallel.dp_rank or 0)}
