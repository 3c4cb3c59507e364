"""Sizes of decoder-only models with ordinary attention, from a Hugging Face config.json or by the model's name."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch

from sglang_oasis.errors import LookaheadKVError
from sglang_oasis.ops.device_step import HEAD_DIM_MOST, HEAD_DIM_STEP, serves

MODEL_TYPES = ("llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe")
"""Model types with the weights that `ModelShape.parameters` counts: attention and gated MLP or experts per layer."""

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}

MAX_CONTEXT = "max_position_embeddings"

PLACEHOLDER = "MODEL_FOLDER"
"""The placeholder in a command for the folder of a model that was given as a lone configuration file."""

_QWEN3 = {
    "head_dim": 128,
    "max_position_embeddings": 40_960,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 151_936,
}
_LLAMA = {
    "max_position_embeddings": 131_072,
    "model_type": "llama",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 128_256,
}

KNOWN_MODELS: dict[str, dict[str, Any]] = {
    "Qwen/Qwen3-8B": {
        **_QWEN3,
        "model_type": "qwen3",
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
    "Qwen/Qwen3-32B": {
        **_QWEN3,
        "model_type": "qwen3",
        "hidden_size": 5120,
        "intermediate_size": 25600,
        "num_hidden_layers": 64,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
    },
    "Qwen/Qwen3-235B-A22B": {
        **_QWEN3,
        "model_type": "qwen3_moe",
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 94,
        "num_attention_heads": 64,
        "num_key_value_heads": 4,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 1536,
    },
    "meta-llama/Llama-3.1-8B": {
        **_LLAMA,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
    "meta-llama/Llama-3.1-70B": {
        **_LLAMA,
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
    },
}
"""The fields of public config.json files that the planner reads."""


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a model that determine the bytes and operations of a decode step.

    Attributes:
        name: name in the output.
        layers: number of layers, all with attention over the whole context.
        hidden, query_heads, kv_heads, head_dim, vocabulary: sizes of the whole model.
        mlp: width of a gated MLP, or of one expert.
        experts: experts per layer, 1 for a dense MLP.
        experts_per_token: experts that a token uses.
        tied_embeddings: whether input and output embedding are one matrix.
        dtype: dtype of the KV cache.
        weight_bytes: bytes per parameter.
        quantised: whether the weights are quantised, according to the checkpoint.
        max_context: longest context that the model was made for, None if the config does not say.
    """

    name: str
    layers: int
    hidden: int
    query_heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    mlp: int
    experts: int
    experts_per_token: int
    tied_embeddings: bool
    dtype: torch.dtype
    weight_bytes: float
    quantised: bool
    max_context: int | None

    @property
    def checkpoint(self) -> str:
        """The value of `--model-path`: the name, or a placeholder if only a configuration file was given."""
        return PLACEHOLDER if self.name.endswith(".json") else self.name

    @property
    def kv_token_bytes(self) -> int:
        """Bytes of K and V of one token in all layers: N_layer * 2 * N_kv * d_h * s (OasisKV Eq. 1)."""
        return self.layers * 2 * self.kv_heads * self.head_dim * self.dtype.itemsize

    @property
    def parameters(self) -> int:
        """Number of elements of all matrices; norms and biases, less than 0.1%, are not counted."""
        return self._layers_with(self.experts) + self._embedding * (1 if self.tied_embeddings else 2)

    @property
    def active_parameters(self) -> int:
        """Number of parameters that one token is multiplied with: includes the output, not the input embedding."""
        return self._layers_with(self.experts_per_token) + self._embedding

    def parameters_read(self, tokens: int) -> float:
        """Return the expected number of parameters that a step over `tokens` tokens reads; experts are independent."""
        untouched = (1 - self.experts_per_token / self.experts) ** tokens
        return self._layers_with(self.experts * (1 - untouched)) + self._embedding

    def kv_heads_of_rank(self, tp: int) -> int:
        """Return the KV heads on one of `tp` ranks; as in SGLang, heads are replicated if fewer than ranks."""
        return max(1, self.kv_heads // tp)

    @property
    def _embedding(self) -> int:
        return self.vocabulary * self.hidden

    def _layers_with(self, experts: int | float) -> Any:
        attention = 2 * self.hidden * self.head_dim * (self.query_heads + self.kv_heads)
        router = self.hidden * self.experts if self.experts > 1 else 0
        return self.layers * (attention + router + experts * 3 * self.hidden * self.mlp)


def model_of(name: str, weight_bits: float | None = None) -> ModelShape:
    """Return a model by its name in `KNOWN_MODELS`, with or without organisation, by its folder or its config.json.

    Args:
        name: value of `--model`.
        weight_bits: bits per weight, None for those of the config's dtype.

    Raises:
        LookaheadKVError: the model is not found, or the planner does not support it.
    """
    known = {short_name(each).lower(): each for each in KNOWN_MODELS}
    path = Path(name)
    if (name and path.is_dir()) or path.suffix == ".json":
        folder = path.parent if path.name == "config.json" else path
        return shape_of(_read_config(path), str(folder), weight_bits)
    short = short_name(name).lower()
    if short not in known:
        names = ", ".join(map(short_name, KNOWN_MODELS))
        raise LookaheadKVError(
            f"--model {shlex.quote(name)} is not known: use one of {names}, a model's folder or its config.json."
        )
    return shape_of(KNOWN_MODELS[known[short]], known[short], weight_bits)


def short_name(model: str) -> str:
    """Return a model's name without its organisation."""
    return model.rsplit("/", 1)[-1]


def shape_of(config: Mapping[str, Any], name: str, weight_bits: float | None = None) -> ModelShape:
    """Return the shape that a config.json describes; arguments and errors as in `model_of`."""
    _check_kind(config, name, weight_bits)
    heads = _size(config, name, "num_attention_heads")
    experts = config.get("num_experts", config.get("num_local_experts")) or 1
    mlp_size = "moe_intermediate_size" if experts > 1 and "moe_intermediate_size" in config else "intermediate_size"
    hidden = _size(config, name, "hidden_size")
    kv_heads = _size(config, name, "num_key_value_heads") if config.get("num_key_value_heads") is not None else heads
    if heads % kv_heads:
        _refuse(name, f"has {heads} query heads for {kv_heads} KV heads", "the first must be a multiple of the second")
    head_dim = _size(config, name, "head_dim") if config.get("head_dim") is not None else hidden // heads
    if head_dim <= 0 or not serves(head_dim):
        _refuse(
            name, f"has heads of {head_dim}", f"the server takes multiples of {HEAD_DIM_STEP} up to {HEAD_DIM_MOST}"
        )
    dtype_name = config.get("dtype") or config.get("torch_dtype") or "bfloat16"
    if dtype_name not in DTYPES:
        _refuse(name, f"has dtype {dtype_name}", f"the planner supports {', '.join(DTYPES)}")
    dtype = DTYPES[dtype_name]
    return ModelShape(
        name=name,
        layers=_size(config, name, "num_hidden_layers"),
        hidden=hidden,
        query_heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocabulary=_size(config, name, "vocab_size"),
        mlp=_size(config, name, mlp_size),
        experts=experts,
        experts_per_token=_size(config, name, "num_experts_per_tok") if experts > 1 else 1,
        tied_embeddings=bool(config.get("tie_word_embeddings", False)),
        dtype=dtype,
        weight_bytes=dtype.itemsize if weight_bits is None else weight_bits / 8,
        quantised=bool(config.get("quantization_config")),
        max_context=_size(config, name, MAX_CONTEXT) if config.get(MAX_CONTEXT) is not None else None,
    )


def _read_config(path: Path) -> Mapping[str, Any]:
    file = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(file.read_text())
    except OSError:
        raise LookaheadKVError(f"--model {path} has no readable {file.name}: give a model's folder.") from None
    except ValueError:
        raise LookaheadKVError(f"--model {path} is not JSON: give a model's folder or its config.json.") from None
    if not isinstance(config, dict):
        raise LookaheadKVError(f"--model {path} is not a model configuration: give a model's config.json.")
    return config


def _check_kind(config: Mapping[str, Any], name: str, weight_bits: float | None) -> None:
    only = "lookahead KV serves ordinary MHA, GQA and MQA models only"
    if config.get("kv_lora_rank") is not None:
        _refuse(name, "has multi-head latent attention (MLA)", only)
    if config.get("is_encoder_decoder"):
        _refuse(name, "has cross-attention", only)
    if set(config.get("layer_types") or ()) - {"full_attention"}:
        _refuse(name, "has layers without full attention", only)
    if config.get("sliding_window") is not None and config.get("use_sliding_window", True):
        _refuse(name, "has sliding-window attention", only)
    architectures = config.get("architectures")
    if architectures and not str(architectures[0]).endswith("ForCausalLM"):
        _refuse(
            name, f"has architecture {architectures[0]}", "lookahead KV serves models that generate (...ForCausalLM)"
        )
    model_type = config.get("model_type")
    if model_type not in MODEL_TYPES:
        _refuse(name, f"has model_type {model_type}", f"the planner supports {', '.join(MODEL_TYPES)}")
    if config.get("mlp_only_layers") or config.get("decoder_sparse_step", 1) != 1:
        _refuse(name, "mixes layers with and without experts", "the planner supports models with one kind of layer")
    if config.get("quantization_config") and weight_bits is None:
        _refuse(name, "has quantised weights", "give the bits per weight with --weight-bits")


def _size(config: Mapping[str, Any], name: str, key: str) -> int:
    value = config.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        _refuse(name, f"has {key} {value}", "its config.json must give a whole number above 0")
    return value


def _refuse(name: str, fault: str, remedy: str) -> NoReturn:
    raise LookaheadKVError(f"--model {name} {fault}: {remedy}.")
