"""Whatever a model asks SGLang's forward context for is the runner's, under each of our attention backends."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.model_executor.forward_context import (
    ForwardContext,
    forward_context,
    get_req_to_token_pool,
    get_token_to_kv_pool,
)
from sglang.srt.models.utils import enable_fused_set_kv_buffer

from sglang_oasis.config import LookaheadKVConfig
from sglang_oasis.engine.device import DeviceEngine
from sglang_oasis.serving.dense_backend import DenseAttentionBackend
from sglang_oasis.serving.drafting import DraftSteps
from sglang_oasis.serving.engines import make_engine
from sglang_oasis.serving.lookahead_backend import LookaheadBackend
from sglang_oasis.tier.host_pool import HostPool
from sglang_oasis.tier.layout import TierLayout
from test.cases.model_runner import make_runner

ROWS, PAGES, BLOCK, HEADS, DIM, CONTEXT = 2, 9, 16, 2, 16, 64

Create = Callable[[Any, LookaheadKVConfig, TierLayout, HostPool], Any]


def lookahead(runner: Any, config: LookaheadKVConfig, layout: TierLayout, host: HostPool) -> LookaheadBackend:
    return LookaheadBackend(runner, make_engine(runner, config, layout, host, cache_bytes=0))


def by_a_device(runner: Any, config: LookaheadKVConfig, layout: TierLayout, host: HostPool) -> LookaheadBackend:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SGLANG_OASIS_DEVICE_PATH", "1")
        backend = lookahead(runner, config, layout, host)
    assert isinstance(backend.engine, DeviceEngine)
    return backend


BACKENDS: dict[str, Create] = {
    "host": lookahead,
    "device": by_a_device,
    "draft": lambda *args: DraftSteps(lookahead(*args), steps=2).attn_backends[-1],
    "dense": lambda runner, config, layout, host: DenseAttentionBackend(runner, host),
}


@pytest.fixture
def runner() -> Any:
    layers = [RadixAttention(2 * HEADS, DIM, DIM**-0.5, HEADS, layer_id=0)]
    return make_runner(layers, rows=ROWS, pool_tokens=PAGES * BLOCK, context=CONTEXT, dtype=torch.float32, device="cpu")


@pytest.mark.parametrize("name", BACKENDS)
def test_models_find_the_pools(runner: Any, name: str) -> None:
    config = LookaheadKVConfig.from_flags({"lookahead_kv_budget_tokens": 2 * BLOCK}, BLOCK)
    layout = TierLayout.of(
        config, num_layers=1, kv_heads=HEADS, head_dim=DIM, dtype=torch.float32, context_length=CONTEXT, draft_tokens=0
    )
    host = HostPool(
        num_pages=PAGES,
        num_layers=1,
        kv_heads=HEADS,
        block_size=BLOCK,
        head_dim=DIM,
        dtype=torch.float32,
        summary_format=layout.summary_format,
    )
    backend = BACKENDS[name](runner, config, layout, host)
    with forward_context(ForwardContext(attn_backend=backend)):
        assert get_token_to_kv_pool() is runner.token_to_kv_pool
        assert get_req_to_token_pool() is runner.req_to_token_pool
        assert not enable_fused_set_kv_buffer(SimpleNamespace())  # what Qwen3-MoE asks in every layer
