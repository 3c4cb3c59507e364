"""The lookahead queries of every source, and the true next query, on a text whose end is decoded.

The reference model reads the text densely and decodes its last tokens, teacher-forced. During step i, which processes
the i-th of them, a source gives a query for step i + 1: m = n - 1 predictions in n steps. A guessed token has the query
that the model would give it at the next token's position: it attends to the text before, and to itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from benchmark.studies.selectors import CapturedAttention
from scripts.eagle3.head import Head
from sglang_oasis.testing.sparse_reference import SparseReference, attending, masked_attention

LAST_QUERY, DUAL, EAGLE3, ORACLE = "last-query", "dual", "EAGLE-3", "oracle"


@dataclass(frozen=True)
class DecodedText:
    """The model's results for a text of T tokens, of which the last n are decoded.

    Attributes:
        tokens: [T] int64.
        steps: n.
        keys, values: per layer [H, T, D], after RoPE.
        queries: [L, n, Hq, D], queries of the decode steps.
        startup: [L, 16, Hq, D], queries of the last prompt tokens.
        features: [T, layers * hidden], outputs of the layers that an EAGLE-3 head reads.
        scale: softmax scale.
    """

    tokens: Tensor
    steps: int
    keys: list[Tensor]
    values: list[Tensor]
    queries: Tensor
    startup: Tensor
    features: Tensor
    scale: float

    @property
    def prompt(self) -> int:
        """Tokens before the first decode step."""
        return len(self.tokens) - self.steps

    @property
    def next_positions(self) -> Tensor:
        """Return the positions of the predicted queries: [m] int64."""
        return torch.arange(self.prompt + 1, len(self.tokens))


class Lookahead(NamedTuple):
    """The predictions of a source.

    Attributes:
        queries: [L, m, Hq, D].
        tokens: [m] int64, the guessed tokens; None if the source guesses none.
    """

    queries: Tensor
    tokens: Tensor | None


class Eagle3(NamedTuple):
    """A trained EAGLE-3 head.

    Attributes:
        head: the head.
        draft_tokens: [draft_vocab] int64, token id of each draft id.
    """

    head: Head
    draft_tokens: Tensor


class GuessAttention:
    """Attention of each token to the text before its position and to itself; keeps the queries, [m, Hq, D] a layer.

    Args:
        text: the text.
        positions: [m] int64, of the tokens.
    """

    def __init__(self, text: DecodedText, positions: Tensor) -> None:
        self._text = text
        self._end = int(positions.max())
        before = torch.arange(self._end) < positions[:, None]
        self._mask = torch.cat([before, torch.eye(len(positions), dtype=torch.bool)], dim=1)[None]
        self.queries: list[Tensor] = []

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        self.queries.append(query.transpose(0, 1))
        keys = torch.cat([self._text.keys[layer][:, : self._end], key], dim=1)
        values = torch.cat([self._text.values[layer][:, : self._end], value], dim=1)
        return masked_attention(query, keys, values, self._mask, scaling)


@torch.inference_mode()
def decode(reference: SparseReference, tokens: Sequence[int], steps: int, layers: Sequence[int]) -> DecodedText:
    """Run the model on a text whose last `steps` tokens are decoded; the features are the outputs of `layers`."""
    attention = CapturedAttention()
    with _outputs(reference, layers) as outputs:
        prompt = reference.prefill(tokens[:-steps])
        tail = torch.tensor([tokens[-steps:]])
        with attending(attention):
            reference.model(tail, past_key_values=prompt.cache, use_cache=True, logits_to_keep=1)
    return DecodedText(
        tokens=torch.tensor(tokens),
        steps=steps,
        keys=[key for _, key, _ in attention.layers],
        values=[layer.values[0] for layer in prompt.cache.layers],
        queries=torch.stack([query.transpose(0, 1) for query, _, _ in attention.layers]),
        startup=prompt.last_queries.transpose(1, 2),
        features=torch.cat([torch.empty(len(tokens), 0), *(torch.cat(outputs[layer]) for layer in layers)], dim=-1),
        scale=attention.layers[0][2],
    )


@contextmanager
def _outputs(reference: SparseReference, layers: Sequence[int]) -> Iterator[dict[int, list[Tensor]]]:
    """Collect the outputs of layers, [tokens, hidden] for each forward pass inside of this context."""
    outputs: dict[int, list[Tensor]] = {layer: [] for layer in layers}
    hooks = [
        reference.model.model.layers[layer].register_forward_hook(lambda _, __, out, kept=kept: kept.append(out[0]))
        for layer, kept in outputs.items()
    ]
    try:
        yield outputs
    finally:
        for hook in hooks:
            hook.remove()


@torch.inference_mode()
def guessed(reference: SparseReference, text: DecodedText, tokens: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Return queries [L, m, Hq, D] of `tokens` [m] at `positions` [m], and the model's next token for each, [m]."""
    attention = GuessAttention(text, positions)
    with attending(attention):
        out = reference.model(tokens[None], position_ids=positions[None], use_cache=False)
    return torch.stack(attention.queries), out.logits[0].argmax(-1)


def oracle(text: DecodedText) -> Lookahead:
    return Lookahead(text.queries[:, 1:], None)


def last_query(text: DecodedText) -> Lookahead:
    return Lookahead(text.queries[:, :-1], None)


def dual(reference: SparseReference, text: DecodedText) -> Lookahead:
    """Predict with the token that the model guessed would follow, as in `sglang_oasis.serving.speculative.dual`."""
    belief = text.tokens[text.prompt : text.prompt + 1]
    beliefs, queries = [], []
    for position in text.next_positions.split(1):
        query, expected = guessed(reference, text, belief, position)
        queries.append(query)
        beliefs.append(belief)
        belief = expected
    return Lookahead(torch.cat(queries, dim=1), torch.cat(beliefs))


@torch.inference_mode()
def eagle3(reference: SparseReference, text: DecodedText, drafter: Eagle3) -> Lookahead:
    """Predict with the head's first draft; for position t + 1 it has the features up to t - 1 and the token at t."""
    embeddings = reference.model.get_input_embeddings()(text.tokens[1:-1])
    logits = drafter.head.next_drafts(embeddings, text.features[:-2], text.steps - 1)
    drafts = drafter.draft_tokens[logits.argmax(-1)]
    return Lookahead(guessed(reference, text, drafts, text.next_positions)[0], drafts)


def lookaheads(reference: SparseReference, text: DecodedText, drafter: Eagle3 | None) -> dict[str, Lookahead]:
    """Return the predictions of every source; EAGLE-3 is missing if there is no drafter."""
    found = {LAST_QUERY: last_query(text), DUAL: dual(reference, text)}
    if drafter is not None:
        found[EAGLE3] = eagle3(reference, text, drafter)
    return {**found, ORACLE: oracle(text)}
