"""Trains the head on collected text and exports it in the format that SGLang loads.

    python -m scripts.eagle3.train --text FOLDER --out assets/eagle3-smollm2-135m

Writes config.json, model.safetensors, and training.json with the command, the seed, the loss curve and how often each
draft is right on text that was held out.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.progress import track
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from scripts.eagle3.collect import LENGTH
from scripts.eagle3.head import Head, HeadShape
from sglang_oasis.reference_model import reference_model_path

DEPTH = 4
"""Number of successive drafts that training unrolls."""
DEPTH_WEIGHT = 0.8
"""Base of the weight of a draft's loss; the exponent is the draft's depth (EAGLE-3)."""


@dataclass(frozen=True)
class Example:
    """One sequence and the target's outputs for it.

    Attributes:
        ids: [T] int64.
        features: [T, layers * hidden] bfloat16, outputs of the chosen layers, concatenated.
        last: [T, hidden] bfloat16, the target's last hidden states, normalised.
        chosen: [T] int64, the target's most likely token after each position.
    """

    ids: Tensor
    features: Tensor
    last: Tensor
    chosen: Tensor


class Target:
    """The reference model with frozen weights."""

    def __init__(self) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(reference_model_path(), dtype=torch.bfloat16).eval()
        self.config = self.model.config
        count = self.config.num_hidden_layers
        # SGLang's own default: the inputs of layers 2, L/2 and L-3 are the outputs of those before them.
        self.layers = (1, count // 2 - 1, count - 4)

    @torch.inference_mode()
    def examples(self, sequences: Sequence[Sequence[int]], note: str) -> list[Example]:
        found = []
        for batch in track(_batches(sorted(sequences, key=len), 8), note, total=-(-len(sequences) // 8)):
            width = max(map(len, batch))
            ids = torch.tensor([[*s, *[0] * (width - len(s))] for s in batch])
            out = self.model.model(ids, output_hidden_states=True)
            features = torch.cat([out.hidden_states[layer + 1] for layer in self.layers], dim=-1)
            chosen = self.model.lm_head(out.last_hidden_state).argmax(-1)
            for i, s in enumerate(batch):
                n = len(s)
                parts = (x[i, :n].clone() for x in (features, out.last_hidden_state, chosen))
                found.append(Example(ids[i, :n].clone(), *parts))
        return found


class Trainer:
    """The head and everything that its training needs.

    Args:
        target: the target model.
        draft_tokens: [draft_vocab] int64, token id of each draft id, ascending.
        rate: peak learning rate.
        steps: total number of optimiser steps.
    """

    def __init__(self, target: Target, draft_tokens: Tensor, rate: float, steps: int) -> None:
        self.target = target
        self.draft_tokens = draft_tokens
        self.head = Head(HeadShape.of(target.config, len(draft_tokens), target.layers))
        self.embedding = target.model.get_input_embeddings().weight.detach()
        self.output = target.model.lm_head.weight.detach()[draft_tokens]
        self.head.lm_head.weight.data.copy_(self.output.float())
        self.draft_of = torch.full((self.embedding.shape[0],), -1)
        self.draft_of[draft_tokens] = torch.arange(len(draft_tokens))
        self.optimizer = torch.optim.AdamW(self.head.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.01)
        self.schedule = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, rate, steps, pct_start=0.05)

    def step(self, batch: Sequence[Example]) -> float:
        """Do one optimiser step; returns the loss of the first draft."""
        losses = [loss for loss, _, _ in self._drafts(batch)]
        total = sum(DEPTH_WEIGHT**i * loss for i, loss in enumerate(losses))
        assert isinstance(total, Tensor)
        self.optimizer.zero_grad(set_to_none=True)
        total.backward()
        torch.nn.utils.clip_grad_norm_(self.head.parameters(), 0.5)
        self.optimizer.step()
        self.schedule.step()
        return float(losses[0])

    @torch.inference_mode()
    def accuracy(self, examples: Sequence[Example]) -> dict[str, Any]:
        """Return how often each draft is the target's choice, given that all earlier drafts were.

        `accept_length` is what SGLang would report for 1, 2, ... drafts per step if all positions were alike.
        """
        right = torch.zeros(DEPTH)
        tried = torch.zeros(DEPTH)
        for batch in _batches(examples, 8):
            so_far: Tensor | None = None
            for depth, (_, hits, counted) in enumerate(self._drafts(batch)):
                before = counted if so_far is None else so_far & counted
                so_far = before & hits
                tried[depth] += before.sum()
                right[depth] += so_far.sum()
        rates = right / tried
        return {
            "right": [round(float(rate), 4) for rate in rates],
            "accept_length": [round(1 + float(rates[: i + 1].cumprod(0).sum()), 3) for i in range(DEPTH)],
        }

    def _drafts(self, batch: Sequence[Example]) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield for each draft its loss, and, [b, T] each, whether it is right and whether it counts.

        The draft at position t and depth i is for token t + 2 + i, which the target chooses at position t + 1 + i, if
        the text has the tokens before it.
        """
        width = max(len(example.ids) for example in batch)
        length = width - 1 - DEPTH
        pad = torch.nn.utils.rnn.pad_sequence
        ids, features, last, chosen = (
            pad([getattr(example, name) for example in batch], batch_first=True)
            for name in ("ids", "features", "last", "chosen")
        )
        lengths = torch.tensor([len(example.ids) for example in batch])
        embeddings = F.embedding(ids[:, 1:], self.embedding)
        with torch.autocast("cpu", torch.bfloat16):
            logits = self.head.drafts(embeddings.to(torch.bfloat16), features[:, :length], DEPTH)
        for depth, given in enumerate(logits):
            at = slice(1 + depth, 1 + depth + length)
            counts = torch.arange(length) + 1 + depth < lengths[:, None]
            wanted = self.draft_of[chosen[:, at]]
            known = counts & (wanted >= 0)
            with torch.no_grad():
                truth = (last[:, at] @ self.output.T).float()[known].softmax(-1)
            loss = F.cross_entropy(given[known].float(), truth)
            yield loss, (given.argmax(-1) == wanted) & known, counts


def most_frequent(sequences: Sequence[Sequence[int]], count: int) -> Tensor:
    """Return the `count` most frequent token ids, ascending."""
    frequency = Counter(token for sequence in sequences for token in sequence)
    tokens = [token for token, _ in frequency.most_common(count)]
    unseen = (token for token in range(count) if token not in frequency)
    while len(tokens) < count:
        tokens.append(next(unseen))
    return torch.tensor(sorted(tokens))


def _batches(items: Sequence[Any], size: int) -> Iterator[Sequence[Any]]:
    return (items[start : start + size] for start in range(0, len(items), size))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, required=True, help="what scripts.eagle3.collect wrote")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--draft-vocab", type=int, default=8192)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--rate", type=float, default=6e-4)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    text = {file.stem: json.loads(file.read_text()) for file in sorted(options.text.glob("*.json"))}
    target = Target()
    examples = {name: target.examples(sequences, f"features of {name}") for name, sequences in text.items()}
    training = examples["train"]
    tokens = most_frequent([s for s in text["train"] if len(s) > 1], options.draft_vocab)
    # The sequences of a batch have similar lengths, to avoid padding.
    batches = [batch for batch in _batches(training, options.batch) if len(batch[-1].ids) > 2 + 2 * DEPTH]
    trainer = Trainer(target, tokens, options.rate, options.epochs * len(batches))
    curve: list[float] = []
    for epoch in range(options.epochs):
        order = torch.randperm(len(batches)).tolist()
        losses = [trainer.step(batches[i]) for i in track(order, f"epoch {epoch + 1} of {options.epochs}")]
        curve += [sum(part) / len(part) for part in _batches(losses, 25)]
        report = {name: trainer.accuracy(found) for name, found in examples.items() if name != "train"}
        print(f"epoch {epoch + 1}: loss {curve[-1]:.3f}", json.dumps(report), flush=True)
        options.out.mkdir(parents=True, exist_ok=True)
        save_file(trainer.head.checkpoint(tokens, target.config.vocab_size), options.out / "model.safetensors")
        (options.out / "config.json").write_text(json.dumps(trainer.head.config(target.config), indent=1) + "\n")
        record = {
            "command": shlex.join(["python", *sys.orig_argv[1:]]),
            "seed": options.seed,
            "epochs": epoch + 1,
            "training_tokens": sum(map(len, text["train"])),
            "longest_sequence": LENGTH,
            "loss_curve": [round(loss, 4) for loss in curve],
            "held_out": report,
        }
        (options.out / "training.json").write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
