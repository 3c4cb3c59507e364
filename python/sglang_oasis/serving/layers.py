"""Reads and checks SGLang's attention layers for both attention backends.

Read from sglang 0.5.23: `layers/radix_attention.py` (RadixAttention, AttentionType), `models/transformers.py`
(attention_instances, sglang_flash_attention_forward).
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from torch import Tensor

from sglang_oasis.errors import LookaheadKVError


def attention_layers(model: torch.nn.Module) -> list[RadixAttention]:
    """Return all attention layers of a loaded model, in the order of their layer numbers.

    SGLang's wrapper around a Transformers model keeps them in a dict, where `modules` does not find them, and sets
    their softmax scale in the first pass; this function sets it before.
    """
    wrapped: dict[int, RadixAttention] = getattr(model, "attention_instances", None) or {}
    layers = {id(module): module for module in model.modules() if isinstance(module, RadixAttention)}
    layers |= {id(layer): layer for layer in wrapped.values()}
    for module in model.modules() if wrapped else ():
        scale, number = getattr(module, "scaling", None), getattr(module, "layer_idx", None)
        if scale is not None and number in wrapped:
            wrapped[number].scaling = float(scale)
    return sorted(layers.values(), key=lambda layer: layer.layer_id)


def layer_inputs(
    layer: RadixAttention, q: Tensor, k: Tensor | None, v: Tensor | None, save_kv_cache: bool, extras: dict[str, Any]
) -> tuple[Tensor, Tensor, Tensor]:
    """Convert the arguments of SGLang's forward methods to query [T, H*G, D], key and value [T, H, D].

    Raises:
        NotImplementedError: the layer needs something that we do not implement, such as attention sinks, which must
            not be ignored silently.
    """
    if k is None or v is None:
        raise NotImplementedError(f"sglang-oasis cannot serve layer {layer.layer_id}, which reuses another layer's KV.")
    named = [name for name, value in extras.items() if value is not None]
    if named or not save_kv_cache:
        what = ", ".join(named) or "save_kv_cache=False"
        raise NotImplementedError(f"sglang-oasis cannot serve attention layer {layer.layer_id}, which passes {what}.")
    heads = layer.tp_k_head_num
    return (
        q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim),
        k.view(-1, heads, layer.qk_head_dim),
        v.view(-1, heads, layer.v_head_dim),
    )


def check_layers(model: torch.nn.Module, flag: str) -> None:
    """Refuse attention layers whose semantics the kernels do not implement.

    Args:
        model: the loaded model.
        flag: the flag that asked for the backend.

    Raises:
        LookaheadKVError: names the layer and what it needs.
    """
    for module in attention_layers(model):
        needs = {
            "a sliding window": module.sliding_window_size > -1,
            "cross attention": module.is_cross_attention,
            "non-causal attention": module.attn_type != AttentionType.DECODER,
            "logit soft-capping": bool(module.logit_cap),
            "different key and value head sizes": module.qk_head_dim != module.v_head_dim,
            "position-dependent temperature": module.xai_temperature_len > 0,
        }
        for need, present in needs.items():
            if present:
                raise LookaheadKVError(
                    f"{flag} cannot serve this model, because attention layer {module.layer_id} needs {need}: "
                    f"start the server without the flag."
                )
