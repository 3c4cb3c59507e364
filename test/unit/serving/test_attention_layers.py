"""Attention layers are found, and those that we cannot serve are refused, wherever SGLang's model files keep them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from sglang.srt.layers.radix_attention import RadixAttention

from sglang_oasis.errors import LookaheadKVError
from sglang_oasis.serving.layers import attention_layers, check_layers


def layer(number: int, **needs: Any) -> RadixAttention:
    return RadixAttention(4, 16, 0.25, 2, layer_id=number, **needs)


class NativeModel(torch.nn.Module):
    def __init__(self, *layers: RadixAttention) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(layers)


class TransformersAttention(torch.nn.Module):
    def __init__(self, number: int, scaling: float) -> None:
        super().__init__()
        self.layer_idx = number
        self.scaling = scaling


class WrappedModel(torch.nn.Module):
    """As SGLang's wrapper around a Transformers model: the layers in a dict, the scale in modules that are not ours."""

    def __init__(self, *layers: RadixAttention) -> None:
        super().__init__()
        self.attention_instances = {each.layer_id: each for each in layers}
        self.model = torch.nn.ModuleList(TransformersAttention(each.layer_id, scaling=0.5) for each in layers)


@pytest.mark.parametrize("kind", [NativeModel, WrappedModel])
def test_layers_are_found_in_their_order(kind: type[torch.nn.Module]) -> None:
    assert [each.layer_id for each in attention_layers(kind(layer(1), layer(0)))] == [0, 1]


@pytest.mark.parametrize("kind", [NativeModel, WrappedModel])
def test_a_layer_that_we_cannot_serve_is_refused(kind: type[torch.nn.Module]) -> None:
    check_layers(kind(layer(0), layer(1)), "--flag")
    with pytest.raises(LookaheadKVError, match="attention layer 1 needs a sliding window"):
        check_layers(kind(layer(0), layer(1, sliding_window_size=128)), "--flag")


def test_a_wrapped_layer_has_the_scale_of_its_module_before_the_first_pass() -> None:
    assert [each.scaling for each in attention_layers(WrappedModel(layer(0), layer(1)))] == [0.5, 0.5]
