"""What the seams on SGLang's speculation change, on their own."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_oasis.seams import speculation


def verify(links: list[list[int]], monkeypatch: pytest.MonkeyPatch, rejects: bool) -> tuple[Any, Any]:
    """Hand links to the hook; a sampler that accepts two drafts of each row stands behind it."""
    monkeypatch.setattr(speculation, "rejects_drafts", lambda: rejects)
    given = SimpleNamespace(
        retrieve_next_token=torch.tensor(links), retrieve_next_sibling=torch.zeros(len(links), 4, dtype=torch.int64)
    )

    def sample(verify_input: Any, batch: Any) -> tuple[Any, Any, Any]:
        rows = len(links)
        index = torch.arange(4).expand(rows, -1).where(torch.arange(4) < 3, -1).int()
        return torch.zeros(rows * 4), torch.full((rows,), 3, dtype=torch.int32), index.contiguous()

    _, lengths, index = speculation._accept_chains(sample, given, None)
    return given, (lengths.tolist(), index.tolist())


def test_only_the_chain_from_the_root_can_be_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    given, accepted = verify([[1, 2, 3, -1], [1, 3, -1, -1], [2, -1, -1, -1]], monkeypatch, rejects=False)
    assert given.retrieve_next_token.tolist() == [[1, 2, 3, -1], [1, -1, -1, -1], [-1, -1, -1, -1]]
    assert (given.retrieve_next_sibling == -1).all()
    assert accepted == ([3, 3, 3], [[0, 1, 2, -1]] * 3), "what was sampled stands"


def test_drafts_that_only_look_ahead_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    _, accepted = verify([[1, 2, 3, -1]] * 2, monkeypatch, rejects=True)
    assert accepted == ([1, 1], [[0, -1, -1, -1]] * 2)
