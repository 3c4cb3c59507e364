"""The EAGLE-3 head as SGLang runs it (`sglang/srt/models/llama_eagle3.py`, 0.5.23), written for training.

A draft layer takes the embedding of the next token and the target's features of this token (its own output, when it
drafts beyond the target), and returns the features that predict the token after the next. EAGLE-3 (Li et al., 2025)
trains it on its own outputs, one to several steps deep, as it will see them in use ("training-time test").
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class HeadShape:
    """Sizes of a head.

    Attributes:
        hidden_size, intermediate_size, heads, kv_heads, head_dim, rms_norm_eps, rope_theta: as in the target.
        draft_vocab: tokens that the head can draft.
        layers: ids of the target layers whose outputs are its features.
    """

    hidden_size: int
    intermediate_size: int
    heads: int
    kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    draft_vocab: int
    layers: tuple[int, ...]

    @classmethod
    def of(cls, target: Any, draft_vocab: int, layers: tuple[int, ...]) -> HeadShape:
        """Return the shape for a target with this Hugging Face configuration."""
        return cls(
            hidden_size=target.hidden_size,
            intermediate_size=target.intermediate_size,
            heads=target.num_attention_heads,
            kv_heads=target.num_key_value_heads,
            head_dim=target.head_dim,
            rms_norm_eps=target.rms_norm_eps,
            rope_theta=target.rope_parameters["rope_theta"],
            draft_vocab=draft_vocab,
            layers=layers,
        )

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> HeadShape:
        """Return the shape in a checkpoint's config.json, which `Head.config` wrote."""
        layers = tuple(config["eagle_config"]["eagle_aux_hidden_state_layer_ids"])
        return cls.of(SimpleNamespace(**config), config["draft_vocab_size"], layers)


class Head(nn.Module):
    """The trainable part; the embedding is that of the target.

    Args:
        shape: sizes.
    """

    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        size, wide = shape.hidden_size, shape.heads * shape.head_dim
        narrow = shape.kv_heads * shape.head_dim
        self.shape = shape
        self.fc = nn.Linear(len(shape.layers) * size, size, bias=False)
        self.input_layernorm = nn.RMSNorm(size, shape.rms_norm_eps)
        self.hidden_norm = nn.RMSNorm(size, shape.rms_norm_eps)
        self.q_proj = nn.Linear(2 * size, wide, bias=False)
        self.k_proj = nn.Linear(2 * size, narrow, bias=False)
        self.v_proj = nn.Linear(2 * size, narrow, bias=False)
        self.o_proj = nn.Linear(wide, size, bias=False)
        self.post_attention_layernorm = nn.RMSNorm(size, shape.rms_norm_eps)
        self.gate_proj = nn.Linear(size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, size, bias=False)
        self.norm = nn.RMSNorm(size, shape.rms_norm_eps)
        self.lm_head = nn.Linear(size, shape.draft_vocab, bias=False)

    @classmethod
    def load(cls, folder: Path) -> tuple[Head, Tensor]:
        """Return the head of a checkpoint, float32, and the token id of each draft id, [draft_vocab] int64."""
        head = cls(HeadShape.from_config(json.loads((folder / "config.json").read_text())))
        stored = load_file(folder / "model.safetensors")
        draft_tokens = stored.pop("d2t") + torch.arange(head.shape.draft_vocab)
        del stored["t2d"]
        own = {
            name.removeprefix("midlayer.").removeprefix("self_attn.").removeprefix("mlp."): tensor.float()
            for name, tensor in stored.items()
        }
        head.load_state_dict(own)
        return head.eval(), draft_tokens

    def drafts(self, embeddings: Tensor, features: Tensor, depth: int) -> list[Tensor]:
        """Return the logits of `depth` successive drafts from every position.

        Args:
            embeddings: [b, T + depth, hidden], of the token after each position.
            features: [b, T, layers * hidden], the target's, of each position.
            depth: number of drafts.

        Returns:
            depth times [b, T, draft_vocab]; the logits at position t of draft i are for token t + 2 + i.
        """
        length = features.shape[1]
        hidden = self.fc(features)
        keys: list[Tensor] = []
        values: list[Tensor] = []
        logits = []
        for step in range(depth):
            hidden = self._layer(embeddings[:, step : step + length], hidden, step, keys, values)
            logits.append(self.lm_head(self.norm(hidden)))
        return logits

    def next_drafts(self, embeddings: Tensor, features: Tensor, count: int) -> Tensor:
        """Return the logits of the first draft for the last `count` positions only, to save memory in a long context.

        Args:
            embeddings: [T, hidden], of the token after each position.
            features: [T, layers * hidden], the target's, of each position.
            count: positions.

        Returns:
            [count, draft_vocab], the last rows of the result of `drafts` with depth 1.
        """
        hidden = self.fc(features)[None]
        both = self._inputs(embeddings[None], hidden)
        first = len(features) - count
        query = self._heads(self.q_proj(both[:, first:]), self.shape.heads, first)
        keys, values = self._keys(both, 0), self._values(both)
        causal = torch.ones(count, len(features), dtype=torch.bool).tril(first)
        out = F.scaled_dot_product_attention(query, keys, values, attn_mask=causal, enable_gqa=True)
        return self.lm_head(self.norm(self._outputs(hidden[:, first:], out)))[0]

    def _layer(self, embeddings: Tensor, hidden: Tensor, step: int, keys: list[Tensor], values: list[Tensor]) -> Tensor:
        """Run the decoder layer at draft `step`; it adds to `keys` and `values`, to which later steps attend.

        A position attends to the features of all positions up to its own, and to its own earlier drafts.
        """
        length = hidden.shape[1]
        both = self._inputs(embeddings, hidden)
        query = self._heads(self.q_proj(both), self.shape.heads, step)
        keys.append(self._keys(both, step))
        values.append(self._values(both))
        group = self.shape.heads // self.shape.kv_heads
        wide_keys = [key.repeat_interleave(group, 1) for key in keys]
        wide_values = [value.repeat_interleave(group, 1) for value in values]
        scale = self.shape.head_dim**-0.5
        causal = torch.ones(length, length, dtype=torch.bool).tril()
        scores = [(query @ wide_keys[0].transpose(2, 3) * scale).masked_fill(~causal, float("-inf"))]
        scores += [(query * key).sum(-1, keepdim=True) * scale for key in wide_keys[1:]]
        weights = torch.cat(scores, dim=-1).float().softmax(-1).to(query.dtype)
        out = weights[..., :length] @ wide_values[0]
        for i, value in enumerate(wide_values[1:]):
            out = out + weights[..., length + i, None] * value
        return self._outputs(hidden, out)

    def _inputs(self, embeddings: Tensor, hidden: Tensor) -> Tensor:
        """Return the input of the query, key and value projections: [b, T, 2 * hidden]."""
        return torch.cat([self.input_layernorm(embeddings), self.hidden_norm(hidden)], dim=-1)

    def _keys(self, both: Tensor, first: int) -> Tensor:
        return self._heads(self.k_proj(both), self.shape.kv_heads, first)

    def _values(self, both: Tensor) -> Tensor:
        return self.v_proj(both).unflatten(-1, (self.shape.kv_heads, -1)).transpose(1, 2)

    def _outputs(self, hidden: Tensor, out: Tensor) -> Tensor:
        """Return the layer's output from its input [b, T, hidden] and the attention output [b, heads, T, D]."""
        hidden = hidden + self.o_proj(out.transpose(1, 2).flatten(2))
        inner = self.post_attention_layernorm(hidden)
        return hidden + self.down_proj(F.silu(self.gate_proj(inner)) * self.up_proj(inner))

    def _heads(self, flat: Tensor, heads: int, first: int) -> Tensor:
        """Split heads, [b, T, heads * D] -> [b, heads, T, D], and rotate to positions first, first + 1, ..."""
        vectors = flat.unflatten(-1, (heads, -1)).transpose(1, 2)
        half = self.shape.head_dim // 2
        frequency = self.shape.rope_theta ** -(torch.arange(half, dtype=torch.float32) / half)
        angle = (torch.arange(vectors.shape[2]) + first)[:, None] * frequency
        cos, sin = angle.cos().to(vectors.dtype), angle.sin().to(vectors.dtype)
        first_half, second_half = vectors[..., :half], vectors[..., half:]
        return torch.cat([first_half * cos - second_half * sin, second_half * cos + first_half * sin], dim=-1)

    def checkpoint(self, draft_tokens: Tensor, vocab: int) -> dict[str, Tensor]:
        """Return the tensors under the names that SGLang loads, in bfloat16.

        Args:
            draft_tokens: [draft_vocab] int64, token id of each draft id, ascending.
            vocab: tokens of the target.
        """
        own = self.state_dict()
        attention = {
            f"self_attn.{name}.weight": own[f"{name}.weight"] for name in ("q_proj", "k_proj", "v_proj", "o_proj")
        }
        mlp = {f"mlp.{name}.weight": own[f"{name}.weight"] for name in ("gate_proj", "up_proj", "down_proj")}
        norms = ("input_layernorm", "hidden_norm", "post_attention_layernorm")
        layer = {**attention, **mlp, **{f"{name}.weight": own[f"{name}.weight"] for name in norms}}
        weights = {
            **{f"midlayer.{name}": tensor for name, tensor in layer.items()},
            **{f"{name}.weight": own[f"{name}.weight"] for name in ("fc", "norm", "lm_head")},
        }
        known = torch.zeros(vocab, dtype=torch.bool)
        known[draft_tokens] = True
        return {
            **{name: tensor.detach().bfloat16().contiguous() for name, tensor in weights.items()},
            "d2t": draft_tokens - torch.arange(len(draft_tokens)),
            "t2d": known,
        }

    def config(self, target: Any) -> dict[str, Any]:
        """Return the checkpoint's config.json; `target` is the target's Hugging Face configuration."""
        shape = self.shape
        return {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            "hidden_size": shape.hidden_size,
            "intermediate_size": shape.intermediate_size,
            "num_hidden_layers": 1,
            "num_attention_heads": shape.heads,
            "num_key_value_heads": shape.kv_heads,
            "head_dim": shape.head_dim,
            "hidden_act": "silu",
            "rms_norm_eps": shape.rms_norm_eps,
            "rope_parameters": {"rope_theta": shape.rope_theta, "rope_type": "default"},
            "max_position_embeddings": target.max_position_embeddings,
            "vocab_size": target.vocab_size,
            "draft_vocab_size": shape.draft_vocab,
            "tie_word_embeddings": False,
            "bos_token_id": target.bos_token_id,
            "eos_token_id": target.eos_token_id,
            "pad_token_id": target.pad_token_id,
            "torch_dtype": "bfloat16",
            "eagle_config": {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": list(shape.layers)},
        }
