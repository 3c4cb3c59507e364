"""A model of every kind of code path equals Hugging Face, within its budget and past it (all are in docs/models.md)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from scripts.models.cases import CASES

TIMEOUT = 1500
"""Seconds for all of them together, on a slow machine that does other things besides."""
pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(TIMEOUT + 100)]

REPOSITORY = Path(__file__).parents[2]
WAYS = ("dense", "lookahead", "device")
MODELS = {
    "qwen3_moe": "a mixture of experts; asks the forward context for the KV pool in every layer",
    "qwen2_moe": "a shared expert, whose gate stock SGLang cannot compute on a CPU",
    "llama, MQA": "one KV head",
    "llama, MHA": "as many KV heads as query heads",
    "llama, heads of 80": "heads that are no power of two",
    "gemma": "heads of 256, query heads that are wider than the hidden size",
    "stablelm": "rotates a quarter of each head",
    "gpt2": "learned positions",
    "cohere": "attention and MLP in parallel",
    "granite": "a softmax scale of its own",
    "smollm3": "SGLang's wrapper around the Transformers model; a layer without positions",
    "internlm2": "remote code, packed projections",
}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One process imports everything once and forks an engine per model and way."""
    out = tmp_path_factory.mktemp("models") / "results.json"
    subprocess.run(
        [sys.executable, "-m", "scripts.models", "--only", *MODELS, "--ways", "stock", *WAYS, "--out", str(out)],
        cwd=REPOSITORY,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=TIMEOUT,
        check=True,
    )
    return json.loads(out.read_text())


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", MODELS)
def test_answers_are_hugging_faces(results: dict[str, Any], name: str, way: str) -> None:
    assert name in CASES
    found = results[name]["ways"][way]
    assert found["status"] == ("as stock" if name == "gemma" else "equal"), found
