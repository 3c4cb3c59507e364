"""The sources of lookahead that speculate, and their servers' flags."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoConfig

from scripts.eagle3.head import Head, HeadShape
from sglang_oasis.reference_model import truncated_model_path
from test.e2e.small_pool import LAYERS

DRAFT_VOCAB = 512

SOURCES = {
    "dual": ("--lookahead-kv-source", "dual"),
    "ngram": (
        *("--speculative-algorithm", "NGRAM", "--speculative-num-draft-tokens", "4"),
        *("--speculative-ngram-max-bfs-breadth", "1"),
    ),
    "eagle3": ("--speculative-algorithm", "EAGLE3", "--speculative-num-steps", "3", "--speculative-eagle-topk", "1"),
}


def write_untrained_head(folder: Path) -> Path:
    """An EAGLE-3 head for the truncated model; what it drafts is nearly always wrong."""
    target = AutoConfig.from_pretrained(truncated_model_path(LAYERS))
    torch.manual_seed(0)
    head = Head(HeadShape.of(target, DRAFT_VOCAB, layers=(0, 1, 2)))
    save_file(head.checkpoint(torch.arange(DRAFT_VOCAB), target.vocab_size), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(head.config(target)))
    return folder


def flags_of(source: str, untrained_head: Path) -> tuple[str, ...]:
    head = ("--speculative-draft-model-path", str(untrained_head)) if source == "eagle3" else ()
    return (*SOURCES[source], *head)
