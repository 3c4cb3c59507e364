"""Measures what calibration is worth: summaries relative to statistics of the keys, and budgets per layer and KV head.

    python -m benchmark.studies.calibration                                            # 8K, K = 128 blocks
    python -m benchmark.studies.calibration --model FOLDER --context 4096 --blocks 64  # another model

Four kinds of text are read once, densely, in float32. For each kind, statistics, tightness and budgets are fitted to
the other three, and selection with the true query is tested on it. What counts is the softmax mass of the resident
blocks, as in `benchmark.studies.selectors`; a gap is what is missing to the blocks of largest mass, as many in each
layer and head.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean

import torch
import transformers
from matplotlib.figure import Figure
from torch import Tensor
from transformers import AutoTokenizer

from benchmark import report
from benchmark.studies.selectors import TAIL, Layer, by_summary, capture, token_mass
from benchmark.studies.texts import DECODED_TEXTS
from sglang_oasis.calibrate import LOOSENESS, TIGHTNESS
from sglang_oasis.ops.summary import SUMMARY_FORMATS, KeyStatistics, SummaryFormat
from sglang_oasis.reference_model import reference_model_path
from sglang_oasis.testing.sparse_reference import SparseReference

BLOCK_SIZE, SINK_BLOCKS = 16, 1
ANSWER = 512
"""Tokens of the answer in texts that have one."""
LEAST_SHARE, MOST_SHARE = 0.25, 4
"""Least and largest budget of a head, relative to the mean."""
INT4 = SUMMARY_FORMATS["int4"]
IDEAL, CALIBRATED = "ideal", "int4, calibrated"
PER_LAYER, PER_HEAD = ", budgets per layer", ", budgets per head"


@dataclass(frozen=True)
class Ranked:
    """What one layer's blocks bring in the order of a ranking.

    Attributes:
        local: mass of the local blocks, mean over heads and queries.
        marginal: [H, R], mass of the block at each rank, mean over the queries.
    """

    local: float
    marginal: Tensor

    def captured(self, blocks: Tensor) -> float:
        """Return the mass with `blocks` [H] int64 of each head, mean over the heads."""
        sums = torch.nn.functional.pad(self.marginal.cumsum(-1), (1, 0))
        return self.local + float(sums.gather(-1, blocks[:, None]).mean())


@dataclass(frozen=True)
class Gap:
    """The result of a way to select on one kind of text.

    Attributes:
        text: kind of text, which nothing was fitted to.
        way: how blocks were selected.
        layers: gap of each layer, in points of attention mass.
    """

    text: str
    way: str
    layers: list[float]


def rank(layer: Layer, scores: Tensor, depth: int) -> Ranked:
    """Order the selectable blocks by `scores` [n, H, N]: the sinks first, `depth` ranks."""
    hidden = ~layer.selectable()[:, None]
    scores = scores.masked_fill(hidden, float("-inf"))
    scores[..., :SINK_BLOCKS] = float("inf")
    mass = layer.mean_mass()
    marginal = mass.masked_fill(hidden, 0).gather(-1, scores.topk(depth).indices).mean(0)
    return Ranked(1 - float((mass * ~hidden).sum(-1).mean()), marginal)


def fitted(layers: Sequence[Layer], depth: int, blocks: int) -> SummaryFormat:
    """Return int4 relative to the statistics of some texts' keys in one layer, with the tightness that suits them."""
    statistics = KeyStatistics.of(torch.cat([layer.blocks for layer in layers], dim=1).transpose(0, 1))

    def mass(looseness: float) -> float:
        fmt = SummaryFormat(INT4.name, INT4.bits, statistics.packed(looseness))
        budget = torch.full((layers[0].blocks.shape[0],), blocks)
        return sum(rank(layer, by_summary(layer, fmt, TIGHTNESS), depth).captured(budget) for layer in layers)

    return SummaryFormat(INT4.name, INT4.bits, statistics.packed(max(LOOSENESS, key=mass)))


def fill(marginals: Tensor, blocks: int) -> Tensor:
    """Divide `blocks` per head among all heads by what the next block of each is worth (water filling).

    Args:
        marginals: [L, H, R], mass of the block at each rank; made monotone first.
        blocks: mean over all heads.

    Returns:
        [L, H] int64.
    """
    least, most = int(LEAST_SHARE * blocks), min(int(MOST_SHARE * blocks), marginals.shape[-1])
    worth = marginals.flip(-1).cummax(-1).values.flip(-1)[..., least:most].flatten(0, 1)
    left = (blocks - least) * worth.shape[0]
    heads = worth.flatten().topk(left).indices // worth.shape[1]
    return (least + torch.bincount(heads, minlength=len(worth))).view(marginals.shape[:2])


@torch.inference_mode()
def rankings(
    texts: Mapping[str, list[tuple[Tensor, Tensor, float]]], context: int, queries: int, blocks: int
) -> dict[str, dict[str, list[tuple[Ranked, list[Ranked]]]]]:
    """Return kind of text -> way to rank -> per layer what it finds there, and in the texts it was fitted to."""
    positions = torch.linspace(context - TAIL, context - 1, queries).round().long()
    depth = min(int(MOST_SHARE * blocks), int(positions[0]) // BLOCK_SIZE - 1)
    found: dict[str, dict[str, list[tuple[Ranked, list[Ranked]]]]] = {text: {} for text in texts}
    for number in report.progress(range(len(next(iter(texts.values())))), "layers"):
        layers = {}
        for text, captured in texts.items():
            tail, keys, scale = captured[number]
            query = tail.transpose(0, 1)[positions - (context - TAIL)]
            mass = token_mass(query, keys, positions, scale)
            layers[text] = Layer.build(query, mass, keys, positions, BLOCK_SIZE, scale)
        for text, tested in layers.items():
            others = [layer for other, layer in layers.items() if other != text]
            formats = SUMMARY_FORMATS | {CALIBRATED: fitted(others, depth, blocks)}
            for way in (IDEAL, *formats):
                ordered = [
                    rank(one, one.mean_mass() if way == IDEAL else by_summary(one, formats[way], TIGHTNESS), depth)
                    for one in (tested, *others)
                ]
                found[text].setdefault(way, []).append((ordered[0], ordered[1:]))
    return found


def gaps(text: str, found: Mapping[str, list[tuple[Ranked, list[Ranked]]]], blocks: int) -> list[Gap]:
    """Return the gaps on one kind of text, with the same budget for all heads and with one for each."""
    heads = len(found[IDEAL][0][0].marginal)
    uniform = torch.full((len(found[IDEAL]), heads), blocks)
    ideal = [tested.captured(budget) for (tested, _), budget in zip(found[IDEAL], uniform, strict=True)]
    results = []
    for way, layers in found.items():
        marginals = torch.stack([torch.stack([one.marginal for one in others]).mean(0) for _, others in layers])
        per_layer = fill(marginals.mean(1, keepdim=True), blocks).expand(-1, heads)
        divided = {way: uniform, way + PER_LAYER: per_layer, way + PER_HEAD: fill(marginals, blocks)}
        for name, budgets in divided.items():
            captured = [tested.captured(budget) for (tested, _), budget in zip(layers, budgets, strict=True)]
            results.append(Gap(text, name, [100 * (best - got) for best, got in zip(ideal, captured, strict=True)]))
    return [gap for gap in results if gap.way != IDEAL]


def show(found: Sequence[Gap], title: str) -> None:
    """Show mean and worst layer of every way: a column per kind of text."""
    texts, ways = dict.fromkeys(gap.text for gap in found), dict.fromkeys(gap.way for gap in found)
    cells = {(gap.way, gap.text): f"{fmean(gap.layers):.2f} ({max(gap.layers):.1f})" for gap in found}
    mean = {way: fmean(fmean(gap.layers) for gap in found if gap.way == way) for way in ways}
    rows = [[way, *(cells[way, text] for text in texts), f"{mean[way]:.2f}"] for way in ways]
    report.show_table(title, ["gap, points (worst layer)", *texts, "mean"], rows)


def draw(found: Sequence[Gap], title: str) -> Figure:
    """Draw the gap of each layer, mean over the texts."""
    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.subplots()
    for way in dict.fromkeys(gap.way for gap in found):
        layers = torch.tensor([gap.layers for gap in found if gap.way == way]).mean(0)
        axes.plot(layers, ":" if way.endswith(PER_LAYER) else "--" if way.endswith(PER_HEAD) else "-", label=way)
    axes.axhline(0, color="grey", lw=1)
    axes.set_xlabel("layer")
    axes.set_ylabel("gap to the uniform ideal, points")
    axes.set_title(title)
    axes.legend()
    return figure


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="folder of a model (default: the reference model)")
    parser.add_argument("--context", type=int, default=8192, help="tokens of each text (default: 8192)")
    parser.add_argument("--blocks", type=int, default=128, help=f"K, selected blocks of {BLOCK_SIZE} (default: 128)")
    parser.add_argument("--queries", type=int, default=64, help="measured queries of each text (default: 64)")
    parser.add_argument("--name", default="calibration", help="name of the files under benchmark/results")
    options = parser.parse_args(arguments)
    if options.context < BLOCK_SIZE * 2 * options.blocks + TAIL:
        parser.error(f"--context must be at least {BLOCK_SIZE * 2 * options.blocks + TAIL}, got {options.context}")

    path = options.model or reference_model_path()
    tokenizer, reference = AutoTokenizer.from_pretrained(path), SparseReference.from_pretrained(path)
    texts = {}
    for text in report.progress(list(DECODED_TEXTS), "reading"):
        (tokens,) = DECODED_TEXTS[text](tokenizer, 1, options.context, ANSWER)
        texts[text] = capture(reference, tokens)
    found = [
        gap
        for text, ways in rankings(texts, options.context, options.queries, options.blocks).items()
        for gap in gaps(text, ways, options.blocks)
    ]
    title = f"{path.name}: K = {options.blocks} blocks of {options.context} tokens"
    show(found, title)
    record = {
        "model": path.name,
        "transformers": transformers.__version__,
        "options": vars(options),
        "gaps": [asdict(gap) for gap in found],
    }
    report.save(options.name, record, draw(found, title))


if __name__ == "__main__":
    main()
