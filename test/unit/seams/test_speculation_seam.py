"""What the seams on SGLang's speculation change, on their own."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from sglang_oasis.seams import speculation
from sglang_oasis.serving.speculative.chains import longest_chains


def verify(rows: int, monkeypatch: pytest.MonkeyPatch, rejects: bool) -> tuple[list[int], list[list[int]]]:
    """Accepted tokens and places when a sampler that accepts two drafts of each row stands behind the hook."""
    monkeypatch.setattr(speculation, "rejects_drafts", lambda: rejects)

    def sample(*args: Any) -> tuple[Any, Any, Any]:
        index = torch.arange(4).expand(rows, -1).where(torch.arange(4) < 3, -1).int()
        return torch.zeros(rows * 4), torch.full((rows,), 3, dtype=torch.int32), index.contiguous()

    idle = SimpleNamespace(forward_mode=SimpleNamespace(is_idle=lambda: True))  # sampling has tests of its own
    _, lengths, index = speculation._accept_or_reject(sample, None, idle, None)
    return lengths.tolist(), index.tolist()


def test_what_was_accepted_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    assert verify(2, monkeypatch, rejects=False) == ([3, 3], [[0, 1, 2, -1]] * 2)


def test_drafts_that_only_look_ahead_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    assert verify(2, monkeypatch, rejects=True) == ([1, 1], [[0, -1, -1, -1]] * 2)


def tree(nodes: list[tuple[int, int]]) -> tuple[Any, Any]:
    """Tokens and mask, as SGLang's corpus gives them, of nodes (token, parent); the root's parent is -1."""
    mask = np.zeros((len(nodes), len(nodes)), dtype=np.uint8)
    for node, (_, parent) in enumerate(nodes):
        if parent >= 0:
            mask[node] = mask[parent]
        mask[node, node] = 1
    return np.array([token for token, _ in nodes], dtype=np.int32), mask.flatten()


ROOT = (7, -1)
# Nodes (token, parent), numbered breadth first -> the chain.
TREES: list[tuple[list[tuple[int, int]], list[int]]] = [
    ([ROOT, (1, 0), (2, 1), (3, 2), (4, 3)], [7, 1, 2, 3, 4]),
    ([ROOT, (9, 0), (1, 0), (2, 2), (3, 3)], [7, 1, 2, 3, 3]),  # a shorter match comes first
    ([ROOT, (1, 0), (9, 0), (2, 1), (8, 2)], [7, 1, 2, 2, 2]),  # two as long: the first
    ([ROOT, (1, 0), (0, 1), (0, 0), (0, 0)], [7, 1, 0, 0, 0]),  # token 0 was drafted, and fills up
    ([ROOT, (1, 0), (0, 0), (0, 0), (0, 0)], [7, 1, 1, 1, 1]),
    ([ROOT, (0, 0), (0, 0), (0, 0), (0, 0)], [7, 7, 7, 7, 7]),  # nothing matched
]


def test_of_a_tree_the_longest_path_is_verified() -> None:
    given = [tree(nodes) for nodes, _ in TREES]
    tokens, mask = np.concatenate([t for t, _ in given]), np.concatenate([m for _, m in given])
    chains, links = longest_chains(tokens, mask, 5)
    assert chains.reshape(-1, 5).tolist() == [chain for _, chain in TREES]
    assert (links.reshape(-1, 5, 5) == np.tril(np.ones((5, 5)))).all()
    assert (chains.dtype, chains.shape) == (tokens.dtype, tokens.shape)
    assert (links.dtype, links.shape) == (mask.dtype, mask.shape)


def test_what_sglangs_corpus_drafts_becomes_chains() -> None:
    """Its own links would let a shorter match, numbered first, cut the longest one short after a draft."""
    from sglang.srt.speculative.cpp_ngram.ngram_corpus import NgramCorpus

    corpus = NgramCorpus(max_trie_depth=8, min_bfs_breadth=1, max_bfs_breadth=1, draft_token_num=6)
    corpus.batch_put([[1, 2, 3, 4, 5, 6, 7], [20, 3, 9], [30, 3, 8]])
    corpus.synchronize()
    asked = (["a", "b"], [[1, 2, 3], [50, 51]], [3, 2])
    tokens, mask = speculation._draft_chains(NgramCorpus.batch_get, corpus, *asked)
    assert tokens.reshape(2, 6).tolist() == [[3, 4, 5, 6, 7, 7], [51] * 6]
    assert torch.from_numpy(mask).sum() == 2 * 21
