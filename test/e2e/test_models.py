"""A model of every kind of code path equals Hugging Face, within its budget and past it (all are in docs/models.md)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

TIMEOUT = 1500
"""Seconds for all of them together, on a slow machine that does other things besides."""
pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(TIMEOUT + 100)]

REPOSITORY = Path(__file__).parents[2]
MODELS = {
    "qwen3_moe": "a mixture of experts; asks the forward context for the KV pool in every layer",
    "llama, MQA": "one KV head",
    "llama, heads of 80": "heads that are no power of two",
    "gpt2": "learned positions",
    "qwen2_moe": "a shared expert, whose gate stock SGLang cannot compute on a CPU",
    "llama, MHA": "as many KV heads as query heads",
    "llama, heads of 256": "the largest heads of the device path",
    "stablelm": "rotates a quarter of each head",
    "cohere": "attention and MLP in parallel",
    "granite": "a softmax scale of its own",
    "smollm3": "SGLang's wrapper around the Transformers model; a layer without positions",
    "internlm2": "remote code, packed projections",
}
EVERY_WAY = list(MODELS)[:4]
"""The others differ in what comes before attention, and are served with lookahead only."""
SERVED = [(name, way) for name in EVERY_WAY for way in ("lookahead", "dense", "device")]
SERVED += [(name, "lookahead") for name in MODELS if name not in EVERY_WAY]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Any]:
    """A process imports everything once and forks an engine per model and way."""
    found: dict[tuple[str, str], Any] = {}
    for ways in (("lookahead", "dense", "device"), ("lookahead",)):
        names = [name for name in MODELS if (name in EVERY_WAY) == (len(ways) > 1)]
        out = tmp_path_factory.mktemp("models") / "results.json"
        subprocess.run(
            [sys.executable, "-m", "scripts.models", "--only", *names, "--ways", *ways, "--out", str(out)],
            cwd=REPOSITORY,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            timeout=TIMEOUT / 2,
            check=True,
        )
        given = json.loads(out.read_text())
        found |= {(name, way): given[name]["ways"][way] for name in names for way in ways}
    return found


@pytest.mark.parametrize(("name", "way"), SERVED)
def test_answers_are_hugging_faces(results: dict[tuple[str, str], Any], name: str, way: str) -> None:
    assert results[name, way]["status"] == "equal", results[name, way]
