"""The EAGLE-3 head that training writes is the head that a measurement reads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig

from scripts.eagle3.head import Head, HeadShape

TARGET = LlamaConfig(
    vocab_size=61,
    hidden_size=48,
    intermediate_size=40,
    num_hidden_layers=8,
    num_attention_heads=6,
    num_key_value_heads=2,
    head_dim=8,
)
DRAFT_VOCAB = 20
LENGTH = 13


@pytest.fixture
def head() -> Head:
    torch.manual_seed(0)
    return Head(HeadShape.of(TARGET, DRAFT_VOCAB, (1, 3, 4)))


def test_a_checkpoint_reads_back(head: Head, tmp_path: Path) -> None:
    draft_tokens = torch.randperm(TARGET.vocab_size)[:DRAFT_VOCAB].sort().values
    save_file(head.checkpoint(draft_tokens, TARGET.vocab_size), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(head.config(TARGET)))
    read, read_tokens = Head.load(tmp_path)
    assert read.shape == head.shape
    assert torch.equal(read_tokens, draft_tokens)
    for (name, stored), (_, trained) in zip(read.state_dict().items(), head.state_dict().items(), strict=True):
        assert stored.dtype == torch.float32
        assert torch.equal(stored, trained.bfloat16().float()), name


def test_next_drafts_are_the_end_of_the_first_of_all_drafts(head: Head) -> None:
    features = torch.randn(LENGTH, 3 * TARGET.hidden_size)
    embeddings = torch.randn(LENGTH, TARGET.hidden_size)
    (everywhere,) = head.drafts(embeddings[None], features[None], depth=1)
    torch.testing.assert_close(head.next_drafts(embeddings, features, count=5), everywhere[0, -5:])
