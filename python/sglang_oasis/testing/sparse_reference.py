"""Block-sparse decoding of an ordinary Hugging Face model in float32 on a CPU, with which servers are compared.

It shares no code with the server. Keys and values stay in the model's own dense cache; sparsity is only a mask, one per
KV head. Because decoding is teacher-forced, all decode steps run in ONE forward pass: step `i` is the query at position
`prompt_len + i`, and the mask lets each query attend to the tokens that it would see in a step of its own.

Shapes are as in `selection`; `n` is the number of decode steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from copy import deepcopy
from dataclasses import dataclass
from inspect import signature
from os import PathLike
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AutoModelForCausalLM, DynamicCache, PreTrainedModel

from sglang_oasis.testing.selection import membership, minmax_scores, top_k
from sglang_oasis.testing.trace import StepSelection

ATTENTION_NAME = "block_sparse_reference"
_layer_attention: ContextVar[LayerAttention] = ContextVar("layer_attention")
"""The attention of the current forward pass, kept here because not every model passes keywords to its attention."""
LOOKAHEAD_PROMPT_QUERIES = 16


class LayerAttention(Protocol):
    """One layer's attention: `query` `[Hq, Q, D]`, `key` and `value` `[H, T, D]` -> `[Hq, Q, D]`, all after RoPE.

    The queries are those of the last `Q` of the `T` tokens.
    """

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor: ...


def _attention_interface(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: None, **kwargs: Any
) -> tuple[Tensor, None]:
    """The function that transformers calls: passes the layer to the attention of the current forward pass."""
    scaling = kwargs.get("scaling") or query.shape[-1] ** -0.5
    output = _layer_attention.get()(module.layer_idx, query[0], key[0], value[0], scaling)
    return output.transpose(0, 1)[None], None


AttentionInterface.register(ATTENTION_NAME, _attention_interface)


@contextmanager
def attending(layer_attention: LayerAttention) -> Iterator[None]:
    """Let forward passes inside of this context attend as `layer_attention` does."""
    token = _layer_attention.set(layer_attention)
    try:
        yield
    finally:
        _layer_attention.reset(token)


def masked_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float) -> Tensor:
    """Return grouped-query attention with one mask per KV head.

    `query` `[Hq, Q, D]`, `key` and `value` `[H, T, D]`, `mask` bool `[H or 1, Q, T]` -> `[Hq, Q, D]`.
    """
    kv_heads, length, dim = key.shape
    grouped = query.reshape(kv_heads, -1, query.shape[1], dim)
    shape = (kv_heads, grouped.shape[1], length, dim)
    output = scaled_dot_product_attention(
        grouped, key[:, None].expand(shape), value[:, None].expand(shape), attn_mask=mask[:, None], scale=scaling
    )
    return output.reshape(query.shape)


def attended_positions(
    selected: Tensor, *, first_local_block: Tensor, positions: Tensor, block_size: int, length: int
) -> Tensor:
    """Return the mask of a selection: bool `[H, n, length]`, true where a query attends.

    `selected` is int32 `[n, H, K]` (-1 for empty slots), `first_local_block` and `positions` int64 `[n]`.
    """
    token = torch.arange(length)
    in_selected = membership(selected, -(-length // block_size)) > 0
    local = token // block_size >= first_local_block[:, None]
    causal = token <= positions[:, None]
    return ((in_selected[..., token // block_size] | local[:, None]) & causal[:, None]).transpose(0, 1)


class DenseAttention:
    """Dense causal attention that keeps the queries from which the first decode step is predicted."""

    def __init__(self) -> None:
        self.last_queries: dict[int, Tensor] = {}

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        new, length = query.shape[1], key.shape[1]
        self.last_queries[layer] = query[:, -LOOKAHEAD_PROMPT_QUERIES:].clone()
        causal = torch.ones(new, length, dtype=torch.bool).tril(length - new)
        return masked_attention(query, key, value, causal[None], scaling)


class DecodeAttention:
    """Attention of `n` decode steps in one pass, each to its own blocks.

    `select` returns the selection, int32 `[n, H, K]`, and the scores `[n, H, M]` of a layer; both are kept.
    """

    def __init__(
        self,
        select: Callable[[int, Tensor], Tensor],
        *,
        first_local_block: Tensor,
        candidates: Tensor,
        block_size: int,
        sink_blocks: int,
    ) -> None:
        self.select = select
        self.candidates = candidates
        self.first_local_block = first_local_block
        self.block_size = block_size
        self.sink_blocks = sink_blocks
        self.scores: list[Tensor] = []
        self.selected: list[Tensor] = []

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        local, block_size = self.first_local_block, self.block_size
        scores = minmax_scores(
            query,
            key,
            first_local_block=self.candidates,
            block_size=block_size,
            scaling=scaling,
            sink_blocks=self.sink_blocks,
        )
        selected = self.select(layer, scores)
        self.scores.append(scores)
        self.selected.append(selected)
        steps, length = query.shape[1], key.shape[1]
        mask = attended_positions(
            selected,
            first_local_block=local,
            positions=torch.arange(length - steps, length),
            block_size=block_size,
            length=length,
        )
        return masked_attention(query, key, value, mask, scaling)


@dataclass(frozen=True)
class PrefilledPrompt:
    """A prefilled prompt, from which decoding can start any number of times."""

    length: int
    logprobs: Tensor
    """`[vocab]`: log-probabilities of the first output token."""
    last_queries: Tensor
    """`[layers, Hq, <=16, D]`: the last prompt queries of the last prefill chunk, after RoPE."""
    cache: DynamicCache


class Decoded(NamedTuple):
    logprobs: Tensor
    """`[n, vocab]`: log-probabilities, row `i` of output token `i + 1`."""
    scores: Tensor
    """`[layers, n, H, M]`: scores of every block for the step's own query; -inf for blocks that are not candidates."""
    selected: Tensor
    """int32 `[layers, n, H, K]`: blocks attended besides the local blocks."""


class SparseReference:
    """Prefills densely, decodes sparsely. `model` is switched to this module's attention and to evaluation mode.

    `kv_dtype` is that of the server's KV cache: keys and values are rounded to it, after RoPE.
    """

    def __init__(self, model: PreTrainedModel, kv_dtype: torch.dtype = torch.float32) -> None:
        if model.dtype != torch.float32:
            raise ValueError(f"The model of the reference must be float32, got {model.dtype}.")
        model.set_attn_implementation(ATTENTION_NAME)
        self.model = model.eval()
        self.kv_dtype = kv_dtype
        self._forward_parameters = signature(model.forward).parameters

    @classmethod
    def from_pretrained(cls, path: str | PathLike[str], kv_dtype: torch.dtype = torch.float32) -> SparseReference:
        return cls(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32), kv_dtype)

    def prefill(self, prompt_ids: Sequence[int], chunk: int = 1024) -> PrefilledPrompt:
        """Runs the prompt, in chunks of `chunk` tokens to limit memory; the last chunk gives `last_queries`.

        Raises `ValueError` if the model computes its attention itself (GPT-J), because then there is no reference.
        """
        attention = DenseAttention()
        cache = DynamicCache()
        for start in range(0, len(prompt_ids), chunk):
            logprobs = self._forward(prompt_ids[start : start + chunk], cache, attention, logits=1)
        if not attention.last_queries:
            raise ValueError(f"{type(self.model).__name__} does not use transformers' attention interface")
        queries = torch.stack([attention.last_queries[layer] for layer in range(len(attention.last_queries))])
        return PrefilledPrompt(len(prompt_ids), logprobs[0], queries, cache)

    def decode_recorded(
        self,
        prompt: PrefilledPrompt,
        output_ids: Sequence[int],
        steps: Sequence[StepSelection],
        *,
        scored_ahead: bool = False,
        sink_blocks: int = 0,
    ) -> Decoded:
        """Decodes with recorded selections; step `i` processes `output_ids[i]` and needs `steps[i]`.

        The scores of step `i` rank the blocks that are selectable in that step, or in the next step if `scored_ahead`.

        Raises `ValueError` if the steps do not belong to this prompt and output.
        """
        expected = list(range(prompt.length + 1, prompt.length + 1 + len(output_ids)))
        if [step.seq_len for step in steps] != expected:
            raise ValueError(f"the steps' lengths are not {expected[0]}..{expected[-1]}")
        selected = torch.stack([step.selected for step in steps], dim=1)
        first_local = torch.tensor([step.first_local_block for step in steps])
        opens_next = torch.tensor([step.seq_len % step.block_size == 0 for step in steps])
        attention = DecodeAttention(
            lambda layer, scores: selected[layer],
            first_local_block=first_local,
            candidates=first_local + opens_next if scored_ahead else first_local,
            block_size=steps[0].block_size,
            sink_blocks=sink_blocks,
        )
        return self._decode(prompt, output_ids, attention)

    def decode_fetch(
        self,
        prompt: PrefilledPrompt,
        output_ids: Sequence[int],
        *,
        k: int,
        block_size: int,
        recent_blocks: int = 1,
        sink_blocks: int = 0,
    ) -> Decoded:
        """Decodes with the true top-`k` blocks of each step's own query, as policy `fetch` promises."""
        positions = torch.arange(prompt.length, prompt.length + len(output_ids))
        first_local = (positions // block_size - recent_blocks).clamp(min=0)
        attention = DecodeAttention(
            lambda layer, scores: top_k(scores, k),
            first_local_block=first_local,
            candidates=first_local,
            block_size=block_size,
            sink_blocks=sink_blocks,
        )
        return self._decode(prompt, output_ids, attention)

    def decode_dense(self, prompt: PrefilledPrompt, output_ids: Sequence[int]) -> Tensor:
        """Returns the log-probabilities `[n, vocab]` with attention to every block."""
        return self._forward(output_ids, deepcopy(prompt.cache), DenseAttention(), logits=len(output_ids))

    def prompt_scores(
        self, prompt: PrefilledPrompt, *, first_local_block: int, block_size: int, sink_blocks: int = 0
    ) -> Tensor:
        """Returns the scores that predict the first decode step, means over the last queries: `[layers, H, M]`."""
        layers = []
        for cached, queries in zip(prompt.cache.layers, prompt.last_queries, strict=True):
            count, dim = queries.shape[1:]
            scores = minmax_scores(
                queries,
                self._rounded(cached.keys[0]),
                first_local_block=torch.full((count,), first_local_block),
                block_size=block_size,
                scaling=dim**-0.5,
                sink_blocks=sink_blocks,
            )
            layers.append(scores.mean(0))
        return torch.stack(layers)

    def _decode(self, prompt: PrefilledPrompt, output_ids: Sequence[int], attention: DecodeAttention) -> Decoded:
        logprobs = self._forward(output_ids, deepcopy(prompt.cache), attention, logits=len(output_ids))
        return Decoded(logprobs, torch.stack(attention.scores), torch.stack(attention.selected))

    @torch.inference_mode()
    def _forward(self, ids: Sequence[int], cache: DynamicCache, attention: LayerAttention, logits: int) -> Tensor:
        """Returns the log-probabilities after the last `logits` of `ids`: `[logits, vocab]`; `cache` grows by `ids`."""

        def on_rounded(layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
            # The cache keeps the exact values; rounding twice gives the same result as once.
            return attention(layer, query, self._rounded(key), self._rounded(value), scaling)

        kept = {"logits_to_keep": logits} if "logits_to_keep" in self._forward_parameters else {}  # not every model
        with attending(on_rounded):
            output = self.model(torch.tensor([list(ids)]), past_key_values=cache, use_cache=True, **kept)
        return output.logits[0, -logits:].log_softmax(-1)

    def _rounded(self, vectors: Tensor) -> Tensor:
        return vectors.to(self.kv_dtype).float()
