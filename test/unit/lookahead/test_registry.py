"""What other packages register is found beside our own, and what the documentation shows computes."""

from __future__ import annotations

import re
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
import torch

from sglang_oasis import registry
from sglang_oasis.errors import LookaheadKVError
from sglang_oasis.lookahead.sources import SOURCES
from sglang_oasis.ops.summary import SUMMARY_FORMATS, block_scores, summarise
from sglang_oasis.registry import Registry

DOCUMENT = Path(__file__).parents[3] / "docs" / "extending.md"


def documented(name: str) -> Any:
    """The function of that name in one of the document's blocks of Python."""
    blocks = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    (code,) = [block for block in blocks if f"def {name}(" in block]
    names: dict[str, Any] = {}
    exec(code, names)
    return names[name]


@pytest.fixture
def entries(monkeypatch: pytest.MonkeyPatch) -> Registry[Any]:
    points = [EntryPoint("good", "math:sqrt", "group"), EntryPoint("bad", "no_such_module:x", "group")]
    monkeypatch.setattr(registry, "entry_points", lambda group: points if group == "group" else [])
    found: Registry[Any] = Registry("--flag", "group")
    found.register("own")("ours")
    return found


def test_our_own_and_those_of_other_packages_are_found(entries: Registry[Any]) -> None:
    assert entries.names() == ["bad", "good", "own"]
    assert entries.find("own") == "ours"
    assert entries.find("good")(9.0) == 3.0


@pytest.mark.parametrize("name", ["nobody", None, ["own"]])
def test_what_nobody_registered_is_refused(entries: Registry[Any], name: Any) -> None:
    with pytest.raises(LookaheadKVError, match=r"^--flag must be one of bad, good, own, got .*\.$"):
        entries.find(name)


def test_a_package_that_cannot_be_imported_is_named(entries: Registry[Any]) -> None:
    with pytest.raises(LookaheadKVError, match=r"^--flag bad cannot be imported \(ModuleNotFoundError: .*no_such_"):
        entries.find("bad")


def test_the_documented_selector_ranks_by_the_midpoint() -> None:
    rng = torch.Generator().manual_seed(1)
    fmt, (rows, heads, group, blocks, dim) = SUMMARY_FORMATS["int8"], (2, 3, 2, 5, 8)
    queries = torch.randn((rows, 2, heads * group, dim), generator=rng)
    records = summarise(torch.randn((rows, heads, blocks, 4, dim), generator=rng), fmt)
    candidates = torch.tensor([5, 3])
    expected = block_scores.reference(queries, records, fmt, candidates, 0.3, 0.0)
    torch.testing.assert_close(documented("midpoint")(queries, records, fmt, candidates, 0.3), expected)


def test_sources_pick_their_queries() -> None:
    queries = torch.arange(6.0).view(2, 3, 1, 1)
    assert SOURCES.find("last-query")(queries).flatten().tolist() == [0, 3]
    assert SOURCES.find("draft")(queries).flatten().tolist() == [1, 2, 4, 5]
    assert SOURCES.find("dual")(queries[:, :1]).flatten().tolist() == [0, 3]
    assert documented("everything")(queries) is queries
