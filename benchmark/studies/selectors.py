"""Measures how much attention mass each way of ranking blocks captures, on real queries and keys.

    python -m benchmark.studies.selectors                                # two windows of prose and two of source code
    python -m benchmark.studies.selectors --windows 1 --texts prose      # a quarter of it

The reference model reads a text once, densely, in float32. At some of its last positions, every layer's queries rank
the selectable blocks of every KV head; what counts is the softmax mass, over all keys, of the K blocks ranked highest,
as a mean over positions, layers, KV heads and the query heads of their group. As in the product, the newest complete
tokens (16) and the open block are resident besides the K blocks and their mass counts; selectable are the blocks before
them. Nothing is random.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from statistics import fmean

import rich
import torch
import transformers
from matplotlib.figure import Figure
from torch import Tensor
from torch.nn.functional import pad
from transformers import AutoTokenizer

from benchmark import report
from benchmark.studies.texts import code, prose
from sglang_oasis.ops.summary import SUMMARY_FORMATS, SummaryFormat, block_scores, summarise, unpack
from sglang_oasis.reference_model import reference_model_path
from sglang_oasis.testing.corpus import Tokenizer
from sglang_oasis.testing.sparse_reference import DenseAttention, SparseReference, attending

BUDGETS = (2048, 1024, 512)
BLOCK_SIZES = (16, 8)
TIGHTNESS = (1.0, 0.75, 0.6, 0.5, 0.25)
RECENT_TOKENS = 16
TAIL = 1024  # the measured positions are spread over this number of last tokens
CODE_MODULES = ("argparse", "inspect", "tarfile", "typing")
IDEAL = "ideal: true mass"
LOCAL = "local"


@dataclass(frozen=True)
class Setup:
    """The extent of the measurements.

    Attributes:
        texts: kinds of text, of `TEXTS`.
        windows: number of texts of each kind.
        context: tokens of each text.
        positions: measured queries per text.
        sink_tokens: first tokens that are always selected, inside the budget.
    """

    texts: tuple[str, ...]
    windows: int
    context: int
    positions: int
    sink_tokens: int

    def query_positions(self) -> Tensor:
        """Return [n] int64, evenly spread over the tail: 64 are 16.2 apart, so every offset within a block occurs."""
        return torch.linspace(self.context - TAIL, self.context - 1, self.positions).round().long()


TEXTS: Mapping[str, Callable[[Tokenizer, int, int], list[list[int]]]] = {
    "prose": prose,
    "code": partial(code, modules=CODE_MODULES),
}


class CapturedAttention(DenseAttention):
    """Dense attention that keeps (queries [Hq, Q, D], keys [H, T, D], scale) of every layer, after RoPE."""

    def __init__(self) -> None:
        super().__init__()
        self.layers: list[tuple[Tensor, Tensor, float]] = []

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        self.layers.append((query, key, scaling))
        return super().__call__(layer, query, key, value, scaling)


@torch.inference_mode()
def capture(reference: SparseReference, tokens: Sequence[int]) -> list[tuple[Tensor, Tensor, float]]:
    """Return queries of the tail and keys of the whole text, per layer."""
    cache = reference.prefill(tokens[:-TAIL]).cache
    attention = CapturedAttention()
    tail = torch.tensor([tokens[-TAIL:]])
    with attending(attention):
        reference.model(tail, past_key_values=cache, use_cache=True, logits_to_keep=1)
    return attention.layers


@dataclass(frozen=True)
class Layer:
    """One layer's queries, and its keys in blocks.

    Attributes:
        query: [n, Hq, D].
        blocks: [H, N, B, D], the complete blocks.
        mass: [n, H, G, N + 1 or N], softmax mass of each block for each query head, the open block last.
        first_local: [n], blocks before it are selectable.
        scale: softmax scale.
    """

    query: Tensor
    blocks: Tensor
    mass: Tensor
    first_local: Tensor
    scale: float

    @classmethod
    def build(
        cls, query: Tensor, mass: Tensor, keys: Tensor, positions: Tensor, block_size: int, scale: float
    ) -> Layer:
        """Build from `query` [n, Hq, D], the tokens' `mass` [n, H, G, T], `keys` [H, T, D] and `positions` [n]."""
        complete = keys.shape[1] // block_size
        return cls(
            query=query,
            blocks=keys[:, : complete * block_size].unflatten(1, (complete, block_size)),
            mass=pad(mass, (0, -mass.shape[-1] % block_size)).unflatten(-1, (-1, block_size)).sum(-1),
            first_local=positions // block_size - -(-RECENT_TOKENS // block_size),
            scale=scale,
        )

    def grouped(self) -> Tensor:
        """Return the queries of each KV head: [n, H, G, D]."""
        return self.query.unflatten(1, (self.blocks.shape[0], -1))

    def selectable(self) -> Tensor:
        """Return whether each complete block may be selected: [n, N] bool."""
        return torch.arange(self.blocks.shape[1]) < self.first_local[:, None]

    def softmax(self, estimate: Tensor) -> Tensor:
        """Return the softmax over the selectable blocks of an unscaled estimate [n, H, G, N]."""
        hidden = ~self.selectable()[:, None, None]
        return (estimate * self.scale).masked_fill(hidden, float("-inf")).softmax(-1)

    def mean_mass(self) -> Tensor:
        """Return the mass of every complete block, mean over the group: [n, H, N]."""
        return self.mass[..., : self.blocks.shape[1]].mean(2)


def by_summary(layer: Layer, fmt: SummaryFormat, tightness: float) -> Tensor:
    """Rank blocks as the product does."""
    records = summarise(layer.blocks.transpose(0, 1), fmt).transpose(0, 1).expand(len(layer.query), -1, -1, -1)
    return block_scores(layer.query[:, None], records, fmt, layer.first_local, layer.scale, tightness)


def estimate(layer: Layer, fmt: SummaryFormat, tightness: float) -> Tensor:
    """Return the estimate of `block_scores` before scaling and softmax: [n, H, G, N]."""
    midpoint, half_range = unpack(summarise(layer.blocks, fmt), fmt).unbind(-2)
    query = layer.grouped()
    return query @ midpoint.mT + tightness * (query.abs() @ half_range.mT)


def max_softmax(layer: Layer, fmt: SummaryFormat, tightness: float) -> Tensor:
    return layer.softmax(estimate(layer, fmt, tightness)).amax(2)


def max_estimate(layer: Layer, fmt: SummaryFormat, tightness: float) -> Tensor:
    return estimate(layer, fmt, tightness).amax(2)


def mean_key(layer: Layer) -> Tensor:
    return layer.softmax(layer.grouped() @ layer.blocks.mean(2).bfloat16().float().mT).mean(2)


@dataclass(frozen=True)
class Selector:
    """A way to rank blocks.

    Attributes:
        name: name in the tables.
        score: layer -> [n, H, N], larger is better; blocks that are not selectable are ignored.
        record_bytes: head dim -> bytes of a block's summary, None when it reads the keys themselves.
        rerank: take the 2K best, read their keys, and keep the K of largest mass among what was read.
    """

    name: str
    score: Callable[[Layer], Tensor]
    record_bytes: Callable[[int], int] | None
    rerank: bool = False


def selectors() -> list[Selector]:
    int4 = SUMMARY_FORMATS["int4"]
    by_format = [
        Selector(f"{fmt.name} {tightness}", partial(by_summary, fmt=fmt, tightness=tightness), fmt.record_bytes)
        for fmt in SUMMARY_FORMATS.values()
        for tightness in TIGHTNESS
    ]
    return [
        Selector(IDEAL, Layer.mean_mass, None),
        *by_format,
        Selector("int4 0.5, max of softmaxes", partial(max_softmax, fmt=int4, tightness=0.5), int4.record_bytes),
        Selector("int4 0.5, max of estimates", partial(max_estimate, fmt=int4, tightness=0.5), int4.record_bytes),
        Selector(
            "int4 0.5, 2K then rerank", partial(by_summary, fmt=int4, tightness=0.5), int4.record_bytes, rerank=True
        ),
        Selector("mean of keys, bf16", mean_key, lambda head_dim: 2 * head_dim),
    ]


def reranked(layer: Layer, candidates: Tensor) -> Tensor:
    """Return scores [n, H, N] from the keys of `candidates` [n, H, C] and local blocks only, -inf elsewhere."""
    count = layer.blocks.shape[1]
    read = torch.zeros(*candidates.shape[:2], count, dtype=torch.bool).scatter_(-1, candidates, True)
    known = layer.mass[..., :count] * read[:, :, None]
    local = (layer.mass[..., :count] * ~layer.selectable()[:, None, None]).sum(-1) + layer.mass[..., count:].sum(-1)
    share = known / (known.sum(-1) + local)[..., None]
    return share.mean(2).masked_fill(~read, float("-inf"))


def select(layer: Layer, selector: Selector, scores: Tensor, k: int, sink_blocks: int) -> Tensor:
    """Return the best selectable blocks by `scores` [n, H, N], the sinks first: [n, H, K] int64."""
    scores = scores.masked_fill(~layer.selectable()[:, None], float("-inf"))
    scores[..., :sink_blocks] = float("inf")
    if selector.rerank:
        scores = reranked(layer, scores.topk(2 * k).indices)
        scores[..., :sink_blocks] = float("inf")
    return scores.topk(k).indices


@dataclass(frozen=True)
class Measurement:
    """The result of one cell of the table for one text.

    Attributes:
        text, window: kind of text and its number.
        block_size, budget: B and K*B, in tokens.
        selector: name of the selector.
        bytes_per_token: bytes of summaries per KV head; None if the selector reads the keys.
        mass: mass of the resident blocks, selected and local, mean over layers, KV heads and positions.
        local_mass: mass of the local blocks only.
        worst_layer: mass of the layer where it is smallest.
    """

    text: str
    window: int
    block_size: int
    budget: int
    selector: str
    bytes_per_token: float | None
    mass: float
    local_mass: float
    worst_layer: float


def token_mass(query: Tensor, keys: Tensor, positions: Tensor, scale: float) -> Tensor:
    """Return the causal softmax of `query` [n, Hq, D] at `positions` [n] over `keys` [H, T, D]: [n, H, G, T]."""
    grouped = query.unflatten(1, (keys.shape[0], -1))
    future = torch.arange(keys.shape[1]) > positions[:, None]
    scores = (grouped @ keys.mT * scale).masked_fill(future[:, None, None], float("-inf"))
    return scores.softmax(-1)


def layer_masses(layer: Layer, block_size: int, sink_tokens: int) -> dict[tuple[str, int], float]:
    """Return (selector, budget) -> mean mass of the resident blocks; (LOCAL, 0) -> that of the local blocks only."""
    mass = layer.mean_mass()
    local = 1 - float((mass * layer.selectable()[:, None]).sum(-1).mean())
    masses = {(LOCAL, 0): local}
    for selector in selectors():
        scores = selector.score(layer)
        for budget in BUDGETS:
            chosen = select(layer, selector, scores, budget // block_size, -(-sink_tokens // block_size))
            masses[selector.name, budget] = local + float(mass.gather(-1, chosen).sum(-1).mean())
    return masses


@torch.inference_mode()
def measure(setup: Setup, reference: SparseReference, text: str, window: int, tokens: list[int]) -> list[Measurement]:
    """Measure all selectors, block sizes and budgets on one text."""
    positions = setup.query_positions()
    per_layer: dict[int, list[dict[tuple[str, int], float]]] = {size: [] for size in BLOCK_SIZES}
    for tail_queries, keys, scale in report.progress(capture(reference, tokens), f"{text} {window}, layers"):
        query = tail_queries.transpose(0, 1)[positions - (setup.context - TAIL)]
        mass = token_mass(query, keys, positions, scale)
        for size in BLOCK_SIZES:
            layer = Layer.build(query, mass, keys, positions, size, scale)
            per_layer[size].append(layer_masses(layer, size, setup.sink_tokens))

    head_dim = keys.shape[-1]
    measurements = []
    for size, selector, budget in product(BLOCK_SIZES, selectors(), BUDGETS):
        resident = [masses[selector.name, budget] for masses in per_layer[size]]
        measurements.append(
            Measurement(
                text=text,
                window=window,
                block_size=size,
                budget=budget,
                selector=selector.name,
                bytes_per_token=selector.record_bytes(head_dim) / size if selector.record_bytes else None,
                mass=fmean(resident),
                local_mass=fmean(masses[LOCAL, 0] for masses in per_layer[size]),
                worst_layer=min(resident),
            )
        )
    return measurements


def mean_mass(measurements: Sequence[Measurement], text: str, block_size: int, budget: int, selector: str) -> float:
    """Return the mean over the windows of a kind of text."""
    wanted = (text, block_size, budget, selector)
    return fmean(m.mass for m in measurements if (m.text, m.block_size, m.budget, m.selector) == wanted)


def show(setup: Setup, measurements: Sequence[Measurement]) -> None:
    """Show one table per kind of text."""
    cells = list(product(BLOCK_SIZES, BUDGETS))
    columns = ["selector", *(f"bytes\nB={size}" for size in BLOCK_SIZES), *(f"{b}\nB={size}" for size, b in cells)]
    stored = {(m.selector, m.block_size): m.bytes_per_token for m in measurements}
    for text in setup.texts:
        rows = []
        for name in (selector.name for selector in selectors()):
            sizes = [stored[name, size] for size in BLOCK_SIZES]
            masses = [mean_mass(measurements, text, size, budget, name) for size, budget in cells]
            rows.append([name, *("-" if s is None else f"{s:.4g}" for s in sizes), *(f"{m:.4f}"[1:] for m in masses)])
        report.show_table(f"{text}: attention mass of the resident blocks by budget and block size", columns, rows)
        local = [
            f"{fmean(m.local_mass for m in measurements if (m.text, m.block_size) == (text, size)):.3f} at B={size}"
            for size in BLOCK_SIZES
        ]
        rich.print(
            f"{setup.windows} texts of {setup.context} tokens, {setup.positions} queries each; bytes of summaries per "
            f"token and KV head. Of the mass, {' and '.join(local)} is in the local blocks (the newest {RECENT_TOKENS} "
            f"complete tokens and the open block), which are resident besides the budget; sinks: {setup.sink_tokens}."
        )


def draw(setup: Setup, measurements: Sequence[Measurement]) -> Figure:
    """Draw mass against tightness: a row per kind of text, a column per budget."""
    figure = Figure(figsize=(4.2 * len(BUDGETS), 3.4 * len(setup.texts)), layout="constrained")
    grid = figure.subplots(len(setup.texts), len(BUDGETS), squeeze=False, sharex=True)
    colours = dict(zip(SUMMARY_FORMATS, ("lightblue", "C0", "C1"), strict=True))
    styles = dict(zip(BLOCK_SIZES, ("--", "-"), strict=True))
    for (row, text), (column, budget) in product(enumerate(setup.texts), enumerate(BUDGETS)):
        axes = grid[row, column]
        mass = partial(mean_mass, measurements, text)
        for size, style in styles.items():
            axes.axhline(mass(size, budget, IDEAL), color="grey", linestyle=style, label=f"ideal, B={size}")
            for name, colour in colours.items():
                values = [mass(size, budget, f"{name} {tightness}") for tightness in TIGHTNESS]
                width = 4 if name == "bf16" else 1.5  # the line of int8 covers it
                axes.plot(TIGHTNESS, values, style, lw=width, color=colour, label=f"{name}, B={size}")
        axes.set_title(f"{text}, budget {budget} tokens")
        axes.set_xlabel("tightness (1 = min/max bound)")
    for axes in grid[:, 0]:
        axes.set_ylabel("attention mass captured")
    figure.legend(*grid[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=4, handlelength=4)
    figure.suptitle(f"SmolLM2-135M-Instruct, context {setup.context} tokens, mean over all layers and KV heads")
    return figure


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", nargs="+", choices=tuple(TEXTS), default=list(TEXTS), help="kinds of text")
    parser.add_argument("--windows", type=int, default=2, help="texts of each kind (default: 2)")
    parser.add_argument("--context", type=int, default=7400, help="tokens of each text, at most 8192 (default: 7400)")
    parser.add_argument("--positions", type=int, default=64, help="measured queries of each text (default: 64)")
    parser.add_argument("--sink-tokens", type=int, default=0, help="first tokens that are always selected (default: 0)")
    parser.add_argument("--name", default="selectors", help="name of the files under benchmark/results")
    options = parser.parse_args(arguments)
    shortest = 2 * max(BUDGETS) + TAIL + RECENT_TOKENS + max(BLOCK_SIZES)
    if not shortest <= options.context <= 8192:
        parser.error(f"--context must be {shortest} to 8192, got {options.context}")
    setup = Setup(tuple(options.texts), options.windows, options.context, options.positions, options.sink_tokens)

    path = reference_model_path()
    tokenizer = AutoTokenizer.from_pretrained(path)
    texts = [
        (text, window, tokens)
        for text in setup.texts
        for window, tokens in enumerate(TEXTS[text](tokenizer, setup.windows, setup.context))
    ]
    reference = SparseReference.from_pretrained(path)
    measurements: list[Measurement] = []
    for text, window, tokens in report.progress(texts, "texts"):
        measurements += measure(setup, reference, text, window, tokens)

    show(setup, measurements)
    record = {
        "model": path.name,
        "transformers": transformers.__version__,
        "setup": asdict(setup) | {"query_positions": setup.query_positions().tolist(), "recent_tokens": RECENT_TOKENS},
        "measurements": [{**asdict(m), "k": m.budget // m.block_size} for m in measurements],
    }
    report.save(options.name, record, draw(setup, measurements))


if __name__ == "__main__":
    main()
