"""The models to try: one case per kind of code path in SGLang's model files.

A case has a transformers model type and differences from `COMMON`. SGLang serves the architecture with its own model
file, or with its Transformers wrapper where it has none.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from scripts.models.renamed import RENAMED

VOCABULARY = 512
CONTEXT = 1024
LAYERS, HEADS, KV_HEADS, HEAD_DIM = 2, 4, 2, 64
HIDDEN, INTERMEDIATE = HEADS * HEAD_DIM, 384

COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": INTERMEDIATE,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "max_position_embeddings": CONTEXT,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
MULTI_HEAD: dict[str, Any] = {"num_key_value_heads": HEADS}
EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
LOCAL_EXPERTS: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2}
ROUTED_EXPERTS: dict[str, Any] = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
}
FULL = ["full_attention"] * LAYERS
ALTERNATING = ["sliding_attention", "full_attention"]
NO_WINDOW: dict[str, Any] = {"layer_types": FULL, "sliding_window": None, "sliding_window_pattern": None}
GPT2: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "n_embd": HIDDEN,
    "n_layer": LAYERS,
    "n_head": HEADS,
    "n_positions": CONTEXT,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@dataclass(frozen=True)
class Case:
    """A tiny model.

    Attributes:
        model_type: model type of transformers, from which the weights and the reference are made.
        config: settings of the configuration in addition to `COMMON`; with `only`, instead of it.
        renamed: the architecture as which SGLang reads these weights, where transformers does not have it: a key of
            `RENAMED`. None for the model type's own.
        engine: keyword arguments of the engine.
        refused: text of the refusal, for a model whose attention is not plain MHA or GQA.
    """

    model_type: str
    config: dict[str, Any] = field(default_factory=dict)
    only: bool = False
    renamed: str | None = None
    engine: dict[str, Any] = field(default_factory=dict)
    refused: str | None = None

    @property
    def settings(self) -> dict[str, Any]:
        return self.config if self.only else {**COMMON, **self.config}


def llama(**config: Any) -> Case:
    return Case("llama", config)


def rope(kind: str, **parameters: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **parameters}}


ORIGINAL: dict[str, Any] = {"original_max_position_embeddings": 256}

CASES: dict[str, Case] = {
    # Heads
    "llama": llama(),
    "llama, MQA": llama(num_key_value_heads=1),
    "llama, MHA": llama(num_key_value_heads=HEADS),
    "llama, 3 query heads per KV head": llama(hidden_size=384, num_attention_heads=6),
    **{f"llama, heads of {dim}": llama(head_dim=dim) for dim in (16, 32, 48, 72, 80, 96, 112, 128, 192, 256)},
    "llama, heads of 40": llama(head_dim=40),
    "llama, heads of 320": llama(head_dim=320),
    "llama, attention biases": llama(attention_bias=True),
    "llama, biases of the MLP": llama(mlp_bias=True),
    "llama, tied embeddings": llama(tie_word_embeddings=True),
    "llama, 5 layers": llama(num_hidden_layers=5),
    # Positions
    "llama, rope linear": llama(**rope("linear", factor=4.0)),
    "llama, rope dynamic": llama(**rope("dynamic", factor=4.0)),
    "llama, rope llama3": llama(
        **rope("llama3", factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, **ORIGINAL),
    ),
    "llama, rope yarn": llama(**rope("yarn", factor=4.0, **ORIGINAL)),
    "llama, through the Transformers wrapper": Case("llama", engine={"model_impl": "transformers"}),
    # Llama's relatives
    "mistral": Case("mistral", {"sliding_window": None}),
    "ministral": Case("ministral", {"layer_types": FULL, "head_dim": HEAD_DIM}),
    "ministral3": Case("ministral3"),
    "qwen2": Case("qwen2"),
    "qwen3": Case("qwen3", {"head_dim": 128}),
    "smollm3": Case("smollm3", {"no_rope_layers": [1, 0]}),
    "granite": Case(
        "granite",
        {
            "attention_multiplier": 0.1,
            "embedding_multiplier": 2.0,
            "residual_multiplier": 0.5,
            "logits_scaling": 2.0,
        },
    ),
    "arcee": Case("arcee", {"head_dim": HEAD_DIM}),
    "apertus": Case("apertus"),
    "seed_oss": Case("seed_oss", {"head_dim": HEAD_DIM}),
    "ernie4_5": Case("ernie4_5", {"head_dim": HEAD_DIM}),
    "exaone4": Case("exaone4", NO_WINDOW),
    "hunyuan_v1_dense": Case("hunyuan_v1_dense", {"head_dim": HEAD_DIM, "use_qk_norm": True}),
    "nemotron": Case("nemotron", {"head_dim": HEAD_DIM}),
    "helium": Case("helium", {"head_dim": HEAD_DIM}),
    "hyperclovax": Case("hyperclovax", {"head_dim": HEAD_DIM, "attention_multiplier": 0.2}),
    "jais2": Case("jais2", {"head_dim": HEAD_DIM}),
    "nanochat": Case("nanochat"),
    "cwm": Case("cwm", {"head_dim": HEAD_DIM, "layer_types": FULL}),
    "olmo": Case("olmo", MULTI_HEAD),
    "olmo, clipped": Case("olmo", {**MULTI_HEAD, "clip_qkv": 1.0}),
    "olmo2": Case("olmo2"),
    "olmo3": Case("olmo3", {"layer_types": FULL}),
    "gemma": Case("gemma", {"head_dim": 256}),
    "glm": Case("glm", {"head_dim": HEAD_DIM}),
    "glm4": Case("glm4", {"head_dim": HEAD_DIM}),
    "phi3": Case("phi3"),
    "phi3, longrope": Case(
        "phi3",
        {
            # Transformers changes the factors for the whole sequence if it becomes longer than this.
            **rope("longrope", long_factor=[2.0] * 32, short_factor=[1.5] * 32, original_max_position_embeddings=512),
            "original_max_position_embeddings": 512,
        },
    ),
    "phi3, partial rotary": Case(
        "phi3", {**rope("default", partial_rotary_factor=0.75), "partial_rotary_factor": 0.75}
    ),
    # Parallel blocks, partial rotary, LayerNorm, learned positions
    "cohere": Case("cohere", {"logit_scale": 0.5}),
    "cohere, query and key norms": Case("cohere", {"logit_scale": 0.5, "use_qk_norm": True}),
    "phi": Case("phi", {**MULTI_HEAD, "intermediate_size": 4 * HIDDEN, **rope("default", partial_rotary_factor=0.5)}),
    "stablelm": Case("stablelm", rope("default", partial_rotary_factor=0.25)),
    "stablelm, parallel": Case("stablelm", {"use_parallel_residual": True, "use_qkv_bias": True}),
    "persimmon": Case("persimmon", {"num_key_value_heads": HEADS}),
    "starcoder2": Case("starcoder2", {"sliding_window": None}),
    "gpt_neox": Case("gpt_neox", {"num_key_value_heads": HEADS}),
    "gpt2": Case("gpt2", GPT2, only=True),
    "gptj": Case("gptj", {**GPT2, "rotary_dim": 32, "tie_word_embeddings": False}, only=True),
    "gpt_bigcode": Case("gpt_bigcode", {**GPT2, "multi_query": True}, only=True),
    "opt": Case("opt", {**COMMON, "ffn_dim": INTERMEDIATE, "word_embed_proj_dim": HIDDEN}, only=True),
    # Mixtures of experts
    "mixtral": Case("mixtral", {**LOCAL_EXPERTS, "sliding_window": None}),
    "qwen2_moe": Case("qwen2_moe", {**EXPERTS, "shared_expert_intermediate_size": 64}),
    "qwen3_moe": Case("qwen3_moe", {**EXPERTS, "head_dim": 128, "norm_topk_prob": True}),
    "olmoe": Case("olmoe", {**EXPERTS, **MULTI_HEAD}),
    "flex_olmo": Case("flex_olmo", EXPERTS),
    "granitemoe": Case("granitemoe", {**LOCAL_EXPERTS, "attention_multiplier": 0.125}),
    "granitemoeshared": Case(
        "granitemoeshared", {**LOCAL_EXPERTS, "attention_multiplier": 0.125, "shared_intermediate_size": 64}
    ),
    "granitemoehybrid, attention only": Case(
        "granitemoehybrid",
        {
            **LOCAL_EXPERTS,
            "attention_multiplier": 0.125,
            "shared_intermediate_size": 64,
            "layer_types": ["attention"] * LAYERS,
            "position_embedding_type": "rope",
            "mamba_n_heads": 8,
            "mamba_d_head": 64,
            "mamba_d_state": 16,
        },
    ),
    "phimoe": Case("phimoe", {**LOCAL_EXPERTS, "attention_bias": True, "lm_head_bias": True}),
    "dbrx": Case(
        "dbrx",
        {
            "d_model": HIDDEN,
            "n_heads": HEADS,
            "n_layers": LAYERS,
            "max_seq_len": CONTEXT,
            "vocab_size": VOCABULARY,
            "attn_config": {"kv_n_heads": KV_HEADS, "clip_qkv": 8.0},
            "ffn_config": {"hidden_size": HIDDEN, "ffn_hidden_size": 128, "moe_num_experts": 4, "moe_top_k": 2},
        },
        only=True,
    ),
    "ernie4_5_moe": Case(
        "ernie4_5_moe",
        {
            "moe_num_experts": 4,
            "moe_k": 2,
            "moe_intermediate_size": 64,
            "moe_num_shared_experts": 1,
            "moe_layer_start_index": 1,
            "moe_layer_end_index": 1,
        },
    ),
    "hunyuan_v1_moe": Case("hunyuan_v1_moe", {"num_experts": 4, "moe_topk": 2, "head_dim": HEAD_DIM}),
    "glm4_moe": Case("glm4_moe", {**ROUTED_EXPERTS, "head_dim": HEAD_DIM, "num_nextn_predict_layers": 0}),
    "dots1": Case("dots1", {**ROUTED_EXPERTS, "layer_types": FULL, "sliding_window": None}),
    "solar_open": Case("solar_open", {**ROUTED_EXPERTS, "head_dim": HEAD_DIM}),
    "exaone_moe": Case("exaone_moe", {**EXPERTS, **NO_WINDOW, "num_shared_experts": 1}),
    "minimax_m2": Case("minimax_m2", {**LOCAL_EXPERTS, "head_dim": HEAD_DIM, "rotary_dim": 32}),
    "hy_v3": Case("hy_v3", {**EXPERTS, "num_shared_experts": 1, "head_dim": HEAD_DIM}),
    "mellum": Case("mellum", {**LOCAL_EXPERTS, "moe_intermediate_size": 64, "head_dim": 64, "layer_types": FULL}),
    "jetmoe": Case("jetmoe", {**LOCAL_EXPERTS, "kv_channels": 64, "num_key_value_heads": 2}),
    # Weights of a model above, named and packed as in these architectures
    **{name: Case(renamed.source, renamed.config, renamed=name) for name, renamed in RENAMED.items()},
    # Models of transformers that neither a model file nor the wrapper of SGLang serves
    **{
        name: Case(name, config, only=True)
        for name, config in {
            "falcon": {**COMMON, "num_kv_heads": 1, "alibi": False},
            "mpt": {"vocab_size": VOCABULARY, "d_model": HIDDEN, "n_heads": HEADS, "n_layers": LAYERS},
            "bloom": {"vocab_size": VOCABULARY, "hidden_size": HIDDEN, "n_layer": LAYERS, "n_head": HEADS},
            "codegen": {**GPT2, "rotary_dim": 32},
        }.items()
    },
    # Refused models
    "gemma2": Case("gemma2", {"head_dim": HEAD_DIM}, refused="sliding-window layers"),
    "gemma3_text": Case(
        "gemma3_text", {"head_dim": HEAD_DIM, "layer_types": ALTERNATING}, refused="sliding-window layers"
    ),
    "gpt_oss": Case(
        "gpt_oss", {**LOCAL_EXPERTS, "head_dim": 64, "layer_types": ALTERNATING}, refused="sliding-window layers"
    ),
    "cohere2": Case("cohere2", {"layer_types": ALTERNATING}, refused="sliding-window layers"),
}
