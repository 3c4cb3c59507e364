"""Measures what is typical for a model's keys, so that block summaries fit them:

    python -m sglang_oasis.calibrate MODEL

It reads about 8,000 tokens of text that every machine with Python has, prose and source code, with transformers, in
float32, and writes a small file into the cache, where servers of this model find it with `--lookahead-kv-calibration
auto`. It needs memory for the model in float32. Statistics are fitted to three quarters of the text and tested on the
last one.
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import pydoc
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from rich.progress import track
from torch import Tensor
from transformers import AttentionInterface, AutoModelForCausalLM, AutoTokenizer
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from sglang_oasis.cache import CacheError, writable_folder
from sglang_oasis.config import DEFAULT_BLOCK_SIZE, SUPPORTED_BLOCK_SIZES, LookaheadKVConfig
from sglang_oasis.errors import LookaheadKVError
from sglang_oasis.lookahead.selectors import SELECTORS, BoundSelector
from sglang_oasis.ops.summary import SUMMARY_FORMATS, KeyStatistics, SummaryFormat, block_scores, summarise
from sglang_oasis.tier.calibration import PART, Calibration, file_name, model_hash

CONTEXT = 2048
"""Tokens of a text."""
TESTED = 512
"""Tokens at the end of a text whose queries are asked."""
BUDGET = 512
"""Selected tokens with which the looseness is chosen: where selection is hard."""
DEFAULTS = LookaheadKVConfig.from_flags({})
SELECTOR = SELECTORS.find(DEFAULTS.selector)
assert isinstance(SELECTOR, BoundSelector)
TIGHTNESS = SELECTOR.tightness
LOOSENESS = (0.4, 0.5, 0.6, 0.75, 0.9, 1.0, 1.25)
MODULES = ("argparse", "json.decoder", "email.message", "http.client")
ATTENTION = "sglang_oasis_calibrate"

Captured = tuple[Tensor, Tensor, float]
"""Queries [T, H*G, D] and keys [T, H, D] of one layer after RoPE, and the softmax scale."""


def texts(tokenizer: Any) -> list[list[int]]:
    """Four texts of CONTEXT tokens: prose, code, other prose, and structured text to test on."""
    reference = "\n\n".join(text for _, text in sorted(topics.items()))
    code = "\n\n".join(inspect.getsource(pydoc.locate(name)) for name in MODULES)  # type: ignore[arg-type]
    prose = tokenizer.encode(reference)
    middle = sorted(topics.items())[len(topics) // 3 :]  # none of the prose that is fitted
    tables = json.dumps({name: text.split("\n")[:12] for name, text in middle}, indent=1)
    pieces = (prose[:CONTEXT], tokenizer.encode(code)[:CONTEXT], prose[-CONTEXT:], tokenizer.encode(tables)[:CONTEXT])
    return [list(piece) for piece in pieces]


@contextmanager
def capturing(kept: dict[int, Captured]) -> Iterator[None]:
    """Keep the queries and keys of every layer of a model that attends with ATTENTION."""

    def attend(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **kwargs: Any) -> Any:
        scale = kwargs.get("scaling") or query.shape[-1] ** -0.5
        kept[module.layer_idx] = query[0].transpose(0, 1), key[0].transpose(0, 1), scale
        return sdpa_attention_forward(module, query, key, value, mask, **kwargs)

    AttentionInterface.register(ATTENTION, attend)
    try:
        yield
    finally:
        AttentionInterface._global_mapping.pop(ATTENTION, None)


@torch.inference_mode()
def capture(folder: Path, show: Callable[[Sequence[Any], str], Any]) -> list[dict[int, Captured]]:
    """Return queries and keys of each text, by layer."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    found = []
    kept: dict[int, Captured] = {}
    with capturing(kept):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation=ATTENTION)
        for text in show(texts(tokenizer), "reading"):
            model(torch.tensor([text]), use_cache=False, logits_to_keep=1)
            found.append(dict(kept))
            kept.clear()
    return found


def blocks_of(keys: Tensor, block_size: int) -> Tensor:
    """[T, H, D] -> complete blocks [N, H, B, D]."""
    complete = keys.shape[0] // block_size
    return keys[: complete * block_size].unflatten(0, (complete, block_size)).transpose(1, 2)


def captured_mass(layer: Captured, fmt: SummaryFormat, block_size: int, tightness: float) -> float:
    """Return the attention mass of what the selector chooses with BUDGET tokens, mean over the last TESTED queries.

    Every eighth query is asked; local blocks count as resident.
    """
    query, keys, scale = layer
    length, heads, _ = keys.shape
    positions = torch.arange(length - TESTED, length, 8)
    grouped = query[positions].unflatten(1, (heads, -1))  # [n, H, G, D]
    scores = torch.einsum("nhgd,thd->nhgt", grouped, keys) * scale
    mass = scores.masked_fill(torch.arange(length) > positions[:, None, None, None], float("-inf")).softmax(-1).mean(2)
    blocks = blocks_of(keys, block_size)
    mass = mass[..., : len(blocks) * block_size].unflatten(-1, (-1, block_size)).sum(-1)  # [n, H, N]
    selectable = positions // block_size - -(-DEFAULTS.recent_tokens // block_size)
    records = summarise(blocks, fmt).transpose(0, 1).contiguous().expand(len(positions), -1, -1, -1)
    ranked = block_scores(query[positions].unsqueeze(1), records, fmt, selectable, scale, tightness)
    best = ranked.topk(BUDGET // block_size, dim=-1)
    chosen = mass.gather(-1, best.indices).masked_fill(best.values == float("-inf"), 0).sum(-1)
    local = mass.masked_fill(torch.arange(len(blocks)) < selectable[:, None, None], 0).sum(-1)
    return float((chosen + local).mean())


def calibrate(folder: Path, block_size: int, show: Callable[[Sequence[Any], str], Any]) -> Calibration:
    """Measure a model.

    Args:
        folder: a Hugging Face folder.
        block_size: tokens per block.
        show: (items, what is done) -> the items, with a progress bar.

    Raises:
        LookaheadKVError: the folder holds no model that transformers loads, or no ordinary attention.
    """
    key = model_hash(folder)
    try:
        *fitted, tested = capture(folder, show)
    except (OSError, ValueError, ImportError, IndexError) as error:
        raise LookaheadKVError(f"The model must be one that transformers can load, got {folder}: {error}.") from error
    if not tested:
        raise LookaheadKVError(f"{folder} must have ordinary attention layers: transformers called none of them.")
    fmt = SUMMARY_FORMATS[DEFAULTS.summary_dtype]
    statistics, looseness, with_it, without = [], [], [], []
    for layer in show(sorted(tested), "fitting"):
        blocks = torch.cat([blocks_of(text[layer][1], block_size) for text in fitted])
        found = KeyStatistics.of(blocks)
        scaled = SummaryFormat(fmt.name, fmt.bits, found.packed())

        def mass(factor: float, text: dict[int, Captured], layer: int = layer, fmt: SummaryFormat = scaled) -> float:
            return captured_mass(text[layer], fmt, block_size, TIGHTNESS * factor)

        best = max(LOOSENESS, key=lambda factor: sum(mass(factor, text) for text in fitted))
        statistics.append(found)
        looseness.append(best)
        with_it.append(mass(best, tested))
        without.append(captured_mass(tested[layer], fmt, block_size, TIGHTNESS))
    return Calibration(
        key,
        block_size,
        statistics,
        torch.tensor(looseness),
        captured=sum(with_it) / len(with_it),
        uncalibrated=sum(without) / len(without),
        context=CONTEXT,
        budget=BUDGET,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m sglang_oasis.calibrate",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", type=Path, metavar="MODEL", help="folder of a Hugging Face model")
    sizes = SUPPORTED_BLOCK_SIZES
    parser.add_argument("--page-size", type=int, choices=sizes, default=DEFAULT_BLOCK_SIZE, help="of the server")
    parser.add_argument("--output", type=Path, metavar="FILE", help="(default: in the cache, where servers look)")
    options = parser.parse_args(arguments)
    folder = options.model.expanduser().resolve()
    try:
        place = writable_folder(PART, 10**7) if options.output is None else options.output.parent
        if not os.access(place, os.W_OK):
            raise CacheError(f"--output must be a file in a folder that can be written, got {options.output}")
        found = calibrate(folder, options.page_size, lambda items, what: track(items, what))
        print(
            f"With {found.budget} of {found.context} tokens, held-out text: {100 * found.captured:.1f}% of the "
            f"attention mass, {100 * found.uncalibrated:.1f}% without calibration."
        )
        if found.captured <= found.uncalibrated:
            raise LookaheadKVError("The calibration does not help this model: nothing is written.")
        file = options.output or place / file_name(found.model, found.block_size)
        found.save(file)
    except (LookaheadKVError, CacheError) as error:
        print(error, file=sys.stderr)
        return 1
    print(f"Written: {file}; servers use it with --lookahead-kv-calibration {options.output or 'auto'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
