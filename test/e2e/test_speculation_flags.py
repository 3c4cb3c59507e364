"""Flags of speculation: what is left out is filled in, what cannot work is refused with one sentence, at once."""

from __future__ import annotations

import json
import re
import shutil
from typing import Any

import pytest

from sglang_oasis.reference_model import truncated_model_path
from test.e2e.refusals import assert_refused, resolved
from test.e2e.sources import write_untrained_head

pytestmark = pytest.mark.e2e

LOOKAHEAD, DENSE = ("--enable-lookahead-kv",), ("--attention-backend", "oasis_cpu")
EAGLE3 = ("--speculative-algorithm", "EAGLE3")
NGRAM = ("--speculative-algorithm", "NGRAM", "--speculative-ngram-max-bfs-breadth", "1")
STEPS, TOPK, TOKENS = "--speculative-num-steps", "--speculative-eagle-topk", "--speculative-num-draft-tokens"
DRAFT_PATH = "--speculative-draft-model-path"
HEAD = (DRAFT_PATH, "HEAD")
"""HEAD stands for its folder."""

# Flags -> steps, top-k and draft tokens.
CHAINS: dict[tuple[str, ...], tuple[int, int, int]] = {
    (): (3, 1, 4),
    (STEPS, "5"): (5, 1, 6),
    (TOKENS, "3"): (2, 1, 3),
    (TOPK, "1"): (3, 1, 4),
    (TOPK, "1", TOKENS, "6"): (5, 1, 6),
    (STEPS, "2", TOPK, "1"): (2, 1, 3),
    (STEPS, "2", TOKENS, "3"): (2, 1, 3),
    (STEPS, "2", TOKENS, "7"): (2, 1, 3),  # SGLang keeps the steps
}
DRAFT_FIELDS = ("speculative_num_steps", "speculative_eagle_topk", "speculative_num_draft_tokens")

ACCEPTED: dict[tuple[str, ...], str] = {
    (*LOOKAHEAD, "--speculative-algorithm", "eagle3", *HEAD): "EAGLE3",
    (*LOOKAHEAD, "--speculative-algorithm", "ngram", *NGRAM[2:]): "NGRAM",
    (*LOOKAHEAD, "--speculative-algorithm", "lookahead_dual"): "LOOKAHEAD_DUAL",
    (*LOOKAHEAD, *NGRAM, "--lookahead-kv-reject-drafts"): "NGRAM",
    (*DENSE, "--speculative-algorithm", "ngram", *NGRAM[2:]): "NGRAM",
}
NO_DRAFTS = "--lookahead-kv-reject-drafts has no effect without drafts"
REFUSED: dict[tuple[str, ...], str] = {
    (*LOOKAHEAD, *EAGLE3): "--speculative-algorithm EAGLE3 needs a draft model",
    (*DENSE, *EAGLE3): "--speculative-algorithm EAGLE3 needs a draft model",
    (*LOOKAHEAD, *EAGLE3, DRAFT_PATH, "/nowhere"): "/nowhere does not exist: check --speculative-draft-model-path.",
    (*LOOKAHEAD, *EAGLE3, DRAFT_PATH, "/proc"): "in the model folder /proc: check --speculative-draft-model-path.",
    (*LOOKAHEAD, *EAGLE3, DRAFT_PATH, "MODEL"): "must be the folder of an EAGLE-3 head that was trained for the model",
    (*LOOKAHEAD, *HEAD): "has no effect without --speculative-algorithm EAGLE3",
    (*LOOKAHEAD, *NGRAM, *HEAD): "has no effect without --speculative-algorithm EAGLE3",
    (*LOOKAHEAD, *EAGLE3, *HEAD, STEPS, "0"): "--speculative-num-steps must be 1 or more, got 0.",
    (*LOOKAHEAD, *EAGLE3, *HEAD, TOKENS, "1"): "--speculative-num-draft-tokens must be 2 or more",
    (*LOOKAHEAD, *EAGLE3, *HEAD, STEPS, "20"): "--speculative-num-draft-tokens must be at most a page of 16 tokens",
    (*LOOKAHEAD, *EAGLE3, *HEAD, "--speculative-draft-attention-backend", "triton"): (
        "does not work with --speculative-draft-attention-backend triton: remove it."
    ),
    (*LOOKAHEAD, *EAGLE3, *HEAD, "--speculative-draft-kv-cache-dtype", "bf16"): (
        "does not work with --speculative-draft-kv-cache-dtype bf16: remove it."
    ),
    (*LOOKAHEAD, *EAGLE3, *HEAD, "--enable-multi-layer-eagle"): "does not work with --enable-multi-layer-eagle",
    (*LOOKAHEAD, *NGRAM, "--speculative-accept-threshold-acc", "0.5"): (
        "does not work with --speculative-accept-threshold-acc 0.5: remove it."
    ),
    (*DENSE, *NGRAM, "--speculative-accept-threshold-single", "0.5"): (
        "does not work with --speculative-accept-threshold-single 0.5: remove it."
    ),
    (*DENSE, *NGRAM, "--enable-watermark"): "cannot watermark the tokens that NGRAM speculates",
    (*LOOKAHEAD, "--speculative-algorithm", "standalone"): "does not work with --speculative-algorithm standalone",
    (*LOOKAHEAD, "--lookahead-kv-reject-drafts"): NO_DRAFTS,
    (*LOOKAHEAD, "--lookahead-kv-reject-drafts", "--lookahead-kv-source", "dual"): NO_DRAFTS,
    (*DENSE, "--speculative-algorithm", "LOOKAHEAD_DUAL"): (
        "--attention-backend oasis_cpu does not work with --speculative-algorithm LOOKAHEAD_DUAL: remove it."
    ),
}
# What is refused without our flags, in another process: a process that once had them keeps the seams.
WITHOUT_OURS = (*EAGLE3, *HEAD)
TOO_SMALL = [
    ((*LOOKAHEAD, *memory), (*LOOKAHEAD, *memory, *EAGLE3, *HEAD))
    for memory in (("--lookahead-kv-device-gb", "0.001"), ("--lookahead-kv-host-gb", "0.001"))
]
"""Too little memory, for the model alone and with a head."""
SHORT_HEAD = (*TOO_SMALL[0][1][:-1], "SHORT HEAD")
"""The same with a head that was trained on short contexts."""


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, ...], dict[str, Any]]:
    head = write_untrained_head(tmp_path_factory.mktemp("head"))
    chains = [(*LOOKAHEAD, *EAGLE3, *HEAD, *flags) for flags in CHAINS]
    lines = [*chains, *ACCEPTED, *REFUSED, *(line for pair in TOO_SMALL for line in pair), SHORT_HEAD]
    short_head = tmp_path_factory.mktemp("short") / "head"
    shutil.copytree(head, short_head)
    config = json.loads((head / "config.json").read_text())
    (short_head / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 64}))
    model = str(truncated_model_path(4))
    folders = {"HEAD": str(head), "SHORT HEAD": str(short_head), "MODEL": model}

    def command(line: tuple[str, ...]) -> list[str]:
        return ["--model-path", model, *(folders.get(word, word) for word in line)]

    found = [*resolved(command(WITHOUT_OURS)), *resolved(*map(command, lines))]
    return dict(zip([WITHOUT_OURS, *lines], found, strict=True))


@pytest.mark.parametrize("flags", CHAINS, ids=" ".join)
def test_what_is_left_out_of_a_chain_is_filled_in(outcomes: dict[Any, dict[str, Any]], flags: tuple[str, ...]) -> None:
    outcome = outcomes[*LOOKAHEAD, *EAGLE3, *HEAD, *flags]
    assert tuple(outcome.get(field) for field in DRAFT_FIELDS) == CHAINS[flags], outcome


@pytest.mark.parametrize("flags", ACCEPTED, ids=" ".join)
def test_an_algorithm_is_named_in_either_case(outcomes: dict[Any, dict[str, Any]], flags: tuple[str, ...]) -> None:
    assert outcomes[flags].get("speculative_algorithm") == ACCEPTED[flags], outcomes[flags]


@pytest.mark.parametrize("flags", REFUSED, ids=" ".join)
def test_what_cannot_work_is_refused(outcomes: dict[Any, dict[str, Any]], flags: tuple[str, ...]) -> None:
    assert_refused(outcomes[flags], REFUSED[flags])


def test_without_our_flags_a_draft_model_is_refused_early_by_sglang(outcomes: dict[Any, dict[str, Any]]) -> None:
    """The ops that it needs on a CPU are not in place."""
    assert "EAGLE3 speculative decoding is not supported by OasisCpuPlatform" in outcomes[WITHOUT_OURS]["message"]


def test_the_least_memory_counts_the_draft_model(outcomes: dict[Any, dict[str, Any]]) -> None:
    for target_alone, with_head in TOO_SMALL:
        sentences = [outcomes[flags]["message"] for flags in (target_alone, with_head)]
        alone, both = (float(re.findall(r"([\d.]+) GB", sentence)[1]) for sentence in sentences)
        assert both > 1.1 * alone, sentences
    # The head decodes at the model's positions.
    assert outcomes[SHORT_HEAD] == outcomes[TOO_SMALL[0][1]]
