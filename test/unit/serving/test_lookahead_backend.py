"""What the backend makes of SGLang's batches and layers, and what it does not let pass."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from sglang_oasis.config import LookaheadKVConfig
from sglang_oasis.errors import LookaheadKVError
from sglang_oasis.serving.engines import make_engine
from sglang_oasis.serving.lookahead_backend import LookaheadBackend
from sglang_oasis.serving.notes import notes_of
from sglang_oasis.tier.host_pool import HostPool
from sglang_oasis.tier.layout import TierLayout
from test.cases.model_runner import make_runner

ROWS, PAGES, BLOCK, HEADS, DIM, CONTEXT, TOKENS = 2, 9, 16, 2, 16, 64, 20
PATHS = pytest.mark.parametrize("device_path", ["0", "1"], ids=["host", "device"])


class Rig:
    """A backend of a model whose attention layers have these numbers.

    Args:
        layers: their numbers.
        num_layers: places for layers, some of which may have no attention.
    """

    def __init__(self, layers: Sequence[int] = (0,), num_layers: int = 1, **of_runner: Any) -> None:
        self.layers = [RadixAttention(2 * HEADS, DIM, 0.1 * (1 + number), HEADS, layer_id=number) for number in layers]
        self.runner = make_runner(
            self.layers, rows=ROWS, pool_tokens=PAGES * BLOCK, context=CONTEXT, dtype=torch.float32, device="cpu",
        )  # fmt: skip
        vars(self.runner).update(of_runner)
        self.config = LookaheadKVConfig.from_flags({"lookahead_kv_budget_tokens": 2 * BLOCK}, BLOCK)
        self.layout = TierLayout.of(
            self.config, num_layers=num_layers, kv_heads=HEADS, head_dim=DIM, dtype=torch.float32,
            context_length=CONTEXT,
        )  # fmt: skip
        self.host = HostPool(
            num_pages=PAGES, num_layers=num_layers, kv_heads=HEADS, block_size=BLOCK, head_dim=DIM,
            dtype=torch.float32, summary_format=self.layout.summary_format,
        )  # fmt: skip
        self.backend = LookaheadBackend(self.runner, make_engine(self.runner, self.config, self.layout, self.host, 0))
        self.runner.req_to_token_pool.req_to_token[1, :TOKENS] = BLOCK + torch.arange(TOKENS)

    def prompt(self) -> Any:
        """A batch of one prompt in row 1."""
        return SimpleNamespace(
            forward_mode=ForwardMode.EXTEND, batch_size=1, rids=["a"], input_ids=torch.zeros(TOKENS),
            req_pool_indices=torch.tensor([1]), seq_lens_cpu=torch.tensor([TOKENS]),
            out_cache_loc=BLOCK + torch.arange(TOKENS), extend_prefix_lens_cpu=[0], extend_seq_lens_cpu=[TOKENS],
        )  # fmt: skip

    def extend(self, batch: Any) -> torch.Tensor:
        torch.manual_seed(1)
        query, key, value = torch.randn(TOKENS, 2 * HEADS * DIM), *torch.randn(2, TOKENS, HEADS * DIM)
        return self.backend.forward_extend(query, key, value, self.layers[0], batch)


def test_a_layer_may_learn_its_scale_in_the_first_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """As SGLang's wrapper around Transformers models does; a device has the scale in its kernels by then."""
    answers = []
    for learned in (0.1, 0.7):
        rig = Rig()
        notes_of(rig.runner).last_chunks = [True]
        rig.layers[0].scaling = learned
        rig.backend.init_forward_metadata(rig.prompt())
        answers.append(rig.extend(rig.prompt()))
    assert not torch.allclose(*answers)
    monkeypatch.setenv("SGLANG_OASIS_DEVICE_PATH", "1")
    rig = Rig()
    rig.layers[0].scaling = 0.7
    with pytest.raises(NotImplementedError, match=r"whose softmax scale changed from 0\.1 to 0\.7"):
        rig.extend(rig.prompt())


def test_places_without_attention_do_not_shift_the_scales() -> None:
    assert Rig(layers=(0, 2), num_layers=3).backend.engine.scales == pytest.approx([0.1, 0.1, 0.3])


@PATHS
def test_an_extend_pass_without_metadata_is_no_batch_that_was_made_up(
    device_path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGLANG_OASIS_DEVICE_PATH", device_path)
    rig = Rig()
    with pytest.raises(RuntimeError, match="has no metadata"):
        rig.extend(rig.prompt())


@PATHS
def test_a_batch_that_nobody_has_noted_is_refused(device_path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_OASIS_DEVICE_PATH", device_path)
    rig = Rig()
    with pytest.raises(RuntimeError, match=r"do not say which requests|as many rows, got None"):
        rig.backend.init_forward_metadata(rig.prompt())


def test_only_a_device_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(NotImplementedError, match="cannot be captured"):
        Rig().backend.init_cuda_graph_state(1, 1)
    monkeypatch.setenv("SGLANG_OASIS_DEVICE_PATH", "1")
    Rig().backend.init_cuda_graph_state(ROWS + 1, ROWS + 1)
    with pytest.raises(RuntimeError, match="at most 3 requests, got"):
        Rig().backend.init_cuda_graph_state(ROWS + 2, ROWS + 2)


def test_a_draft_model_on_cuda_is_refused() -> None:
    with pytest.raises(LookaheadKVError, match="does not serve draft models on a CUDA device yet"):
        Rig(is_draft_worker=True, device="cuda")
