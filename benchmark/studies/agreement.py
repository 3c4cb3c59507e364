"""Measures how well each source predicts the next step's blocks, and how much mass its working set captures.

    python -m benchmark.studies.agreement --head assets/eagle3-smollm2-135m
    python -m benchmark.studies.agreement --texts needles --contexts 4096 --windows 1   # a small part, without EAGLE-3

The reference model reads texts densely, in float32, and decodes their last tokens, teacher-forced. From each source's
lookahead query, the product's selector predicts K blocks for the next step. Agreement is the share of them that the
next step's own query selects, with the same selector; mass is the share of that query's attention, over all keys, on
the predicted blocks and the local ones, as a mean over the query heads of a KV head. Then a working set follows the
predictions as in the product: it starts from the last prompt queries and admits at most C blocks per KV head and step.
Selector, summaries, sinks and recent tokens are the product's defaults. Nothing is random.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import rich
import torch
import transformers
from torch import Tensor
from torch.nn.functional import pad
from transformers import AutoTokenizer

from benchmark import report
from benchmark.studies.agreement_findings import (
    HOW,
    IDEAL,
    OFF,
    SHORTLIST,
    SMOOTHINGS,
    Findings,
    Measurement,
    Setup,
    claims,
    draw,
    show_smoothing,
    show_sources,
)
from benchmark.studies.lookahead_sources import ORACLE, DecodedText, Eagle3, Lookahead, decode, lookaheads
from benchmark.studies.selectors import Layer, token_mass
from benchmark.studies.texts import DECODED_TEXTS
from benchmark.studies.working_set import Smoothing, simulate, smooth
from scripts.eagle3.head import Head
from sglang_oasis.config import LookaheadKVConfig
from sglang_oasis.kernels.cpu import native
from sglang_oasis.lookahead.selectors import SELECTORS
from sglang_oasis.ops.summary import SUMMARY_FORMATS, summarise
from sglang_oasis.reference_model import reference_model_path
from sglang_oasis.testing.sparse_reference import SparseReference
from sglang_oasis.tier.layout import fetch_cap
from sglang_oasis.tier.window import Windows

PRODUCT = LookaheadKVConfig.from_flags({})
SUMMARY = SUMMARY_FORMATS[PRODUCT.summary_dtype]
MATTERS, QUIET, MEMORY = 0.05, 0.01, 8
"""A block matters suddenly if it has at least this mass now, and had less in each of this number of earlier steps."""
LONGEST = 8192
"""Longest context for which the model was trained, in tokens."""


@dataclass(frozen=True)
class Blocks:
    """A text in blocks, as the product would see it in its m predicted steps.

    Attributes:
        startup: [L, H, N], scores for the last prompt queries.
        scores: source -> [m, L, H, N], scores for its lookahead queries.
        mass: [m, L, H, N], attention mass of the complete blocks in the predicted step; 0 for local ones.
        sudden: [m, L, H, N] bool, blocks that matter in the predicted step and did not in those before.
        local: [L], mass of the local blocks.
        candidates: [m] int64, blocks [0, candidates) may be selected.
    """

    startup: Tensor
    scores: Mapping[str, Tensor]
    mass: Tensor
    sudden: Tensor
    local: Tensor
    candidates: Tensor

    @classmethod
    def build(cls, text: DecodedText, sources: Mapping[str, Lookahead]) -> Blocks:
        lengths = torch.arange(text.prompt, len(text.tokens))
        first_local = Windows(lengths, PRODUCT.block_size, PRODUCT.recent_blocks).next.first_local
        startup, masses, sudden = [], [], []
        scores: dict[str, list[Tensor]] = {source: [] for source in sources}
        for index, keys in enumerate(text.keys):
            query = text.queries[index, 1:]
            mass = token_mass(query, keys, text.next_positions, text.scale)
            layer = Layer.build(query, mass, keys, text.next_positions, PRODUCT.block_size, text.scale)
            masses.append(layer.mean_mass().masked_fill(~layer.selectable()[:, None], 0))
            sudden.append((masses[-1] >= MATTERS) & quiet_before(layer.mean_mass()))
            startup.append(rank(layer, text.startup[index][None], first_local[:1])[0])
            for source, lookahead in sources.items():
                scores[source].append(rank(layer, lookahead.queries[index][:, None], first_local[1:]))
        selectable = torch.stack(masses, dim=1)
        return cls(
            startup=torch.stack(startup),
            scores={source: torch.stack(layers, dim=1) for source, layers in scores.items()},
            mass=selectable,
            sudden=torch.stack(sudden, dim=1),
            local=1 - selectable.sum(-1).mean((0, 2)),
            candidates=first_local[1:],
        )

    def weights(self) -> Tensor:
        """Return [m, 3, L, H, N]: attention mass, suddenly important blocks, and those of the previous step."""
        sudden = self.sudden.float()
        return torch.stack([self.mass, sudden, pad(sudden, (0, 0, 0, 0, 0, 0, 1, 0))[:-1]], dim=1)


def rank(layer: Layer, queries: Tensor, candidates: Tensor) -> Tensor:
    """Return the product's scores [m, H, N] for `queries` [m, Q, Hq, D], before the sinks are set to infinity."""
    records = summarise(layer.blocks, SUMMARY).expand(len(queries), -1, -1, -1).contiguous()
    return SELECTORS.find(PRODUCT.selector)(queries, records, SUMMARY, candidates, layer.scale)


def quiet_before(mass: Tensor) -> Tensor:
    """Return whether a block's `mass` [m, H, N] was small in all `MEMORY` previous steps: [m, H, N] bool."""
    loud = torch.ones_like(mass, dtype=torch.bool)
    loud[MEMORY:] = (mass.unfold(0, MEMORY, 1)[:-1] >= QUIET).any(-1)
    return ~loud


def with_sinks(scores: Tensor) -> Tensor:
    """Return the scores [..., N], with infinity for the sinks."""
    sink = torch.arange(scores.shape[-1]) < PRODUCT.sink_blocks
    return scores.masked_fill(sink, float("inf"))


def overlap(selected: Tensor, truth: Tensor, count: int) -> Tensor:
    """Return [V, L], the share of `selected` [m, V, L, H, K] that is in `truth` [m, L, H, K], of `count` blocks."""
    wanted = torch.zeros(*truth.shape[:-1], count, dtype=torch.bool).scatter_(-1, truth, True)
    return captured(wanted.float(), selected) / truth.shape[-1]


def captured(mass: Tensor, selected: Tensor) -> Tensor:
    """Return [V, L], the sum of `mass` [m, L, H, N] over `selected` [m, V, L, H, K], mean over steps and heads."""
    return torch.stack([mass.gather(-1, chosen).sum(-1).mean((0, 2)) for chosen in selected.unbind(1)])


@torch.inference_mode()
def measure(
    setup: Setup, reference: SparseReference, drafter: Eagle3 | None, kind: str, window: int, tokens: list[int]
) -> list[Measurement]:
    """Make all measurements on one text."""
    text = decode(reference, tokens, setup.steps, drafter.head.shape.layers if drafter else ())
    sources = lookaheads(reference, text, drafter)
    blocks = Blocks.build(text, sources)
    about = partial(Measurement, text=kind, window=window, context=len(tokens), sudden_blocks=int(blocks.sudden.sum()))
    found = []
    for source, k in report.progress(list(product(sources, setup.blocks)), f"{kind} {window}, {len(tokens)} tokens"):
        smoothings = SMOOTHINGS if k == setup.blocks[0] else SHORTLIST
        hits = token_hits(text, sources[source])
        for smoothing, result in zip(smoothings, follow(blocks, source, smoothings, k), strict=True):
            found.append(about(k=k, source=source, smoothing=str(smoothing), token_hits=hits, **result))
    return found + [about(k=k, source=IDEAL, smoothing=str(OFF), **ideal(blocks, k)) for k in setup.blocks]


def token_hits(text: DecodedText, lookahead: Lookahead) -> float | None:
    """Return how often the source's guessed token was that of the text; None if the source guesses none."""
    if lookahead.tokens is None:
        return None
    return round(float((lookahead.tokens == text.tokens[text.next_positions]).float().mean()), 4)


def follow(blocks: Blocks, source: str, smoothings: Sequence[Smoothing], k: int) -> Iterator[dict[str, Any]]:
    """Yield, for every smoothing, the fields of a `Measurement` about predictions and working sets."""
    given = blocks.scores[source]
    scores = with_sinks(torch.stack([smooth(given, blocks.startup, s) for s in smoothings], dim=1))
    selected = scores.topk(k).indices
    agreement = overlap(selected, best(blocks, k), scores.shape[-1])
    columns = {"agreement": agreement, "mass": blocks.local + captured(blocks.mass, selected)}
    weights = blocks.weights()
    whole = weights.sum(-1).mean((0, 3)).sum(-1)
    for how, cap in zip(HOW, (fetch_cap(PRODUCT.fetch_ratio, k), k), strict=True):
        run = simulate(scores, with_sinks(blocks.startup), blocks.candidates, weights, k, cap)
        _, sudden, late = run.held.sum(-1) / whole[:, None]
        columns |= {f"{how}_mass": blocks.local + run.held[0], f"{how}_fetched": run.fetched.mean(-1)}
        columns |= {f"{how}_sudden": sudden, f"{how}_late": late}
    for variant in range(len(smoothings)):
        yield {name: rounded(column[variant]) for name, column in columns.items()}


def best(blocks: Blocks, k: int) -> Tensor:
    """Return the blocks that the true next query selects: [m, L, H, K] int64."""
    return with_sinks(blocks.scores[ORACLE]).topk(k).indices


def ideal(blocks: Blocks, k: int) -> dict[str, Any]:
    """Return agreement and mass, per layer, of the K blocks of largest mass."""
    selected = blocks.mass.topk(k).indices[:, None]
    agreement = overlap(selected, best(blocks, k), blocks.mass.shape[-1])
    mass = blocks.local + captured(blocks.mass, selected)
    return {"agreement": rounded(agreement[0]), "mass": rounded(mass[0])}


def rounded(values: Tensor) -> list[float] | float | None:
    """Return JSON values, with None instead of NaN."""
    if values.ndim:
        return [round(value, 4) for value in values.tolist()]
    return None if values.isnan() else round(float(values), 4)


def head_facts(folder: Path) -> dict[str, Any]:
    """Return the folder of a head, and the facts about its training and its accuracy that the training wrote."""
    training = folder / "training.json"
    facts = json.loads(training.read_text()) if training.exists() else {}
    return {"folder": str(folder), "epochs": facts.get("epochs"), "held_out": facts.get("held_out")}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--head", type=Path, help="folder of a trained EAGLE-3 head; without one there is no EAGLE-3")
    parser.add_argument("--texts", nargs="+", choices=tuple(DECODED_TEXTS), default=list(DECODED_TEXTS))
    parser.add_argument("--contexts", nargs="+", type=int, default=[4096, 8000], help="tokens (default: 4096 8000)")
    parser.add_argument("--windows", type=int, default=2, help="texts of each kind (default: 2)")
    parser.add_argument("--steps", type=int, default=128, help="decoded tokens of each text (default: 128)")
    parser.add_argument("--blocks", nargs="+", type=int, default=[128, 64, 32], help="values of K (default: 128 64 32)")
    parser.add_argument("--name", default="agreement", help="name of the files under benchmark/results")
    options = parser.parse_args(arguments)
    least = (max(options.blocks) + 2) * PRODUCT.block_size + options.steps
    if not least <= min(options.contexts) <= max(options.contexts) <= LONGEST:
        parser.error(f"--contexts must be {least} to {LONGEST}")
    setup = Setup(
        tuple(options.texts),
        tuple(options.contexts),
        options.windows,
        options.steps,
        tuple(options.blocks),
        options.head,
    )

    native.load()  # if there is a compiler; the references are slower
    path = reference_model_path()
    tokenizer = AutoTokenizer.from_pretrained(path)
    texts = [
        (kind, window, tokens)
        for kind, context in product(setup.texts, setup.contexts)
        for window, tokens in enumerate(DECODED_TEXTS[kind](tokenizer, setup.windows, context, setup.steps))
    ]
    reference = SparseReference.from_pretrained(path)
    drafter = None if setup.head is None else Eagle3(*Head.load(setup.head))
    measurements: list[Measurement] = []
    for kind, window, tokens in report.progress(texts, "texts"):
        measurements += measure(setup, reference, drafter, kind, window, tokens)

    findings = Findings(setup, measurements)
    show_sources(findings)
    show_smoothing(findings)
    judged = claims(findings)
    for claim in judged:
        rich.print(f"[bold]{'yes' if claim.holds else 'no'}[/bold]: {claim.claim}: {'; '.join(claim.evidence)}")
    record = {
        "model": path.name,
        "transformers": transformers.__version__,
        "setup": asdict(setup) | {"head": None if setup.head is None else head_facts(setup.head)},
        "product": asdict(PRODUCT),
        "claims": [asdict(claim) for claim in judged],
        "measurements": [asdict(m) for m in measurements],
    }
    report.save(options.name, record, draw(findings))


if __name__ == "__main__":
    main()
