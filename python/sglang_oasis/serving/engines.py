"""Chooses the engine of a model runner: the host's engine on a CPU, the device's engine on CUDA."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from sglang_oasis.config import LookaheadKVConfig
from sglang_oasis.engine.base import Engine, EngineSetup
from sglang_oasis.engine.device import DeviceEngine, DeviceSetup
from sglang_oasis.engine.host import HostEngine
from sglang_oasis.env import DebugEnv
from sglang_oasis.errors import LookaheadKVError
from sglang_oasis.serving.layers import attention_layers, check_layers
from sglang_oasis.tier.host_pool import HostPool
from sglang_oasis.tier.layout import TierLayout

if TYPE_CHECKING:
    from sglang.srt.model_executor.model_runner import ModelRunner


def make_engine(
    runner: ModelRunner, config: LookaheadKVConfig, layout: TierLayout, host: HostPool, cache_bytes: int
) -> Engine:
    """Return the engine of a model runner whose pools exist.

    Args:
        runner: the model runner.
        config: the validated configuration; that of a draft model if the runner's model drafts.
        layout: sizes of the tiers.
        host: the host pool that the runner's KV pool wraps; in pinned memory on CUDA.
        cache_bytes: device memory that the page cache may use.

    Raises:
        LookaheadKVError: the model cannot be served.
    """
    check_layers(runner.model, "--enable-lookahead-kv")
    layers, debug = attention_layers(runner.model), DebugEnv.read()
    # A model may have layers without attention.
    scales = [layers[0].scaling] * layout.num_layers
    for layer in layers:
        scales[layer.layer_id - runner.token_to_kv_pool.start_layer] = layer.scaling
    setup = EngineSetup(
        config=config,
        layout=layout,
        host=host,
        num_rows=runner.max_running_requests + 1,
        req_to_token=runner.req_to_token_pool.req_to_token,
        scales=scales,
        integrity_interval=debug.integrity_interval,
    )
    if runner.is_draft_worker and runner.device == "cuda":
        raise LookaheadKVError("--enable-lookahead-kv does not serve draft models on a CUDA device yet: use NGRAM.")
    if runner.is_draft_worker or not (runner.device == "cuda" or debug.device_path):
        return HostEngine(setup, moves_on=not runner.is_draft_worker)
    if len(set(setup.scales)) > 1:
        raise LookaheadKVError(
            "--enable-lookahead-kv cannot serve this model on a CUDA device, because its attention layers have "
            "different softmax scales: start the server without the flag."
        )
    if runner.device == "cuda":
        from sglang_oasis.kernels.cuda import overrides  # imports Triton, which a CPU need not have

        overrides.install()
    return DeviceEngine(
        setup, DeviceSetup(torch.device(runner.device), layers[0].tp_q_head_num, runner.dtype, cache_bytes)
    )
