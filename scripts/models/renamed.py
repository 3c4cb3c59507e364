"""Architectures that transformers lacks, but whose weights are those of another architecture under other names.

The reference of such a model is the model that its weights were taken from. SGLang reads its configuration through
`auto_map`, as it would from the Hub.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

Weights = dict[str, Tensor]


@dataclass(frozen=True)
class Renamed:
    """How another architecture stores the weights.

    Attributes:
        source: model type that the weights come from.
        architecture: the class that SGLang looks for.
        names: regular expressions and their replacements, applied in order.
        config: settings of the source's configuration.
        stored: settings that the stored configuration has in addition to those of the source.
        pack: fuses tensors, before the names are replaced.
    """

    source: str
    architecture: str
    names: Mapping[str, str] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    stored: dict[str, Any] = field(default_factory=dict)
    pack: Callable[[Weights, Any], Weights] = lambda weights, config: weights

    def weights(self, weights: Weights, config: Any) -> Weights:
        renamed = {}
        for name, tensor in self.pack(dict(weights), config).items():
            for pattern, replacement in self.names.items():
                name = re.sub(pattern, replacement, name)
            renamed[name] = tensor.contiguous()
        return renamed


def _qkv(weights: Weights, kind: str, name: str, join: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Weights:
    """Replace the three projections of each layer by one fused projection."""
    for key in [key for key in weights if key.endswith(f"self_attn.q_proj.{kind}")]:
        stem = key.removesuffix(f"q_proj.{kind}")
        parts = [weights.pop(f"{stem}{one}_proj.{kind}") for one in "qkv"]
        weights[f"{stem}{name}.{kind}"] = join(*parts)
    return weights


def _stacked(name: str) -> Callable[[Weights, Any], Weights]:
    def pack(weights: Weights, config: Any) -> Weights:
        for kind in ("weight", "bias"):
            _qkv(weights, kind, name, lambda *parts: torch.cat(parts))
        return weights

    return pack


def _by_group(weights: Weights, config: Any) -> Weights:
    """Fuse projections, per KV head: its query heads, its key head, its value head (InternLM2)."""
    groups, dim = config.num_key_value_heads, config.hidden_size // config.num_attention_heads

    def join(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        parts = [part.reshape(groups, -1, dim, part.shape[-1]) for part in (q, k, v)]
        return torch.cat(parts, dim=1).reshape(-1, q.shape[-1])

    return _qkv(weights, "weight", "wqkv", join)


MHA = {"num_key_value_heads": 4}

RENAMED: dict[str, Renamed] = {
    "xverse": Renamed("llama", "XverseForCausalLM", config=MHA),
    "internlm2": Renamed(
        "llama",
        "InternLM2ForCausalLM",
        {
            r"self_attn\.wqkv": "attention.wqkv",
            r"self_attn\.o_proj": "attention.wo",
            r"mlp\.gate_proj": "feed_forward.w1",
            r"mlp\.up_proj": "feed_forward.w3",
            r"mlp\.down_proj": "feed_forward.w2",
            r"input_layernorm": "attention_norm",
            r"post_attention_layernorm": "ffn_norm",
            r"model\.embed_tokens": "model.tok_embeddings",
            r"^lm_head": "output",
        },
        stored={"bias": False},
        pack=_by_group,
    ),
    "internlm3": Renamed("llama", "InternLM3ForCausalLM"),
    "baichuan": Renamed("llama", "BaichuanForCausalLM", config=MHA, pack=_stacked("W_pack")),
    "exaone": Renamed(
        "llama",
        "ExaoneForCausalLM",
        {
            r"^model\.layers": "transformer.h",
            r"self_attn\.o_proj": "attn.attention.out_proj",
            r"self_attn": "attn.attention",
            r"mlp\.gate_proj": "mlp.c_fc_0",
            r"mlp\.up_proj": "mlp.c_fc_1",
            r"mlp\.down_proj": "mlp.c_proj",
            r"input_layernorm": "ln_1",
            r"post_attention_layernorm": "ln_2",
            r"model\.embed_tokens": "transformer.wte",
            r"^model\.norm": "transformer.ln_f",
        },
        stored={"activation_function": "silu", "layer_norm_epsilon": 1e-6, "num_layers": 2},
    ),
    "qwen": Renamed(
        "qwen2",
        "QWenLMHeadModel",
        {
            r"^model\.layers": "transformer.h",
            r"self_attn\.c_attn": "attn.c_attn",
            r"self_attn\.o_proj": "attn.c_proj",
            r"mlp\.gate_proj": "mlp.w2",
            r"mlp\.up_proj": "mlp.w1",
            r"mlp\.down_proj": "mlp.c_proj",
            r"input_layernorm": "ln_1",
            r"post_attention_layernorm": "ln_2",
            r"model\.embed_tokens": "transformer.wte",
            r"^model\.norm": "transformer.ln_f",
        },
        config=MHA,
        stored={"intermediate_size": 2 * 384, "layer_norm_epsilon": 1e-6},  # SGLang halves it
        pack=_stacked("c_attn"),
    ),
    "chatglm": Renamed(
        "glm",
        "ChatGLMModel",
        {
            r"^model\.layers": "transformer.encoder.layers",
            r"self_attn": "self_attention",
            r"o_proj": "dense",
            r"mlp\.gate_up_proj": "mlp.dense_h_to_4h",
            r"mlp\.down_proj": "mlp.dense_4h_to_h",
            r"model\.embed_tokens": "transformer.embedding.word_embeddings",
            r"^model\.norm": "transformer.encoder.final_layernorm",
            r"^lm_head": "transformer.output_layer",
        },
        config={"head_dim": 64},
        stored={
            "model_type": "chatglm",
            "num_layers": 2,
            "ffn_hidden_size": 384,
            "kv_channels": 64,
            "padded_vocab_size": 512,
            "multi_query_attention": True,
            "multi_query_group_num": 2,
            "rmsnorm": True,
            "layernorm_epsilon": 1.5625e-07,
            "add_qkv_bias": True,
            "seq_length": 1024,
            "post_layer_norm": True,
            "add_bias_linear": False,
            "hidden_dropout": 0.0,
        },
        pack=_stacked("query_key_value"),
    ),
    "minicpm": Renamed(
        "llama",
        "MiniCPMForCausalLM",
        stored={"scale_emb": 1.0, "dim_model_base": 256, "scale_depth": 2**0.5},
    ),
    "deepseek": Renamed(
        "mixtral",
        "DeepseekForCausalLM",
        {
            r"block_sparse_moe": "mlp",
            r"(experts\.\d+)\.w1": r"\1.gate_proj",
            r"(experts\.\d+)\.w3": r"\1.up_proj",
            r"(experts\.\d+)\.w2": r"\1.down_proj",
        },
        config={"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
        stored={
            "n_routed_experts": 4,
            "n_shared_experts": None,
            "moe_intermediate_size": 384,
            "norm_topk_prob": True,
            "first_k_dense_replace": 0,
            "moe_layer_freq": 1,
        },
    ),
    "bailing_moe": Renamed(
        "mixtral",
        "BailingMoeForCausalLM",
        {
            r"block_sparse_moe": "mlp",
            r"(experts\.\d+)\.w1": r"\1.gate_proj",
            r"(experts\.\d+)\.w3": r"\1.up_proj",
            r"(experts\.\d+)\.w2": r"\1.down_proj",
            r"self_attn\.query_key_value": "attention.query_key_value",
            r"self_attn\.o_proj": "attention.dense",
            r"model\.embed_tokens": "model.word_embeddings",
        },
        config={"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
        stored={
            "num_experts": 4,
            "num_shared_experts": 0,
            "moe_intermediate_size": 384,
            "norm_topk_prob": True,
            "first_k_dense_replace": 0,
            "use_bias": False,
            "use_qkv_bias": False,
            "head_dim": 64,
            "embedding_dropout": 0.0,
            "norm_head": False,
        },
        pack=_stacked("query_key_value"),
    ),
}
