"""A real server in float32 computes what the reference computes from the same blocks, and chooses the blocks it says.

The server records, per decode step, the blocks every layer and KV head attended to. The reference replays them as a
mask over dense attention: log-probabilities must agree. The reference also scores all blocks with its own queries along
the way: the recorded blocks must be the top-K of the right query.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import AutoConfig, AutoTokenizer

from sglang_oasis.ops.summary import KeyStatistics
from sglang_oasis.reference_model import reference_model_path
from sglang_oasis.testing.corpus import real_text_tokens
from sglang_oasis.testing.selection import membership, selection_is_top_k, top_k
from sglang_oasis.testing.server import launch_server
from sglang_oasis.testing.sparse_reference import Decoded, PrefilledPrompt, SparseReference
from sglang_oasis.testing.trace import StepSelection, load_trace
from sglang_oasis.tier.calibration import Calibration, model_hash

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

# Ends inside a block: the last prompt token and the first decoded one then have the same local blocks.
PROMPT_TOKENS = 6_005
DECODE_STEPS = 64
BLOCK_SIZE = 16
BUDGET_TOKENS = 1024
TOP_LOGPROBS = 20

LOGPROB_TOLERANCE = 1e-3
# Near-ties, relative to the score. Summaries are rounded to bfloat16, so a key that differs in its last float32 bit can
# move a bound by 2^-8 and a score by several percent. That is rare: with relative noise of 1e-5 on every key 0.4% of
# the selections leave the narrow tolerance, none the wide one, and 99.99% of the blocks stay.
NARROW_TIE, WIDE_TIE = 1e-3, 0.1
FEWEST_NARROW = 0.99
FEWEST_IDENTICAL = 0.999

SMOOTHING, ESCAPE = 0.9, 3.0
POLICIES = {
    "fetch": ("--lookahead-kv-miss-policy", "fetch"),
    "drop": (
        *("--lookahead-kv-miss-policy", "drop", "--lookahead-kv-fetch-ratio", "1.0"),
        *("--lookahead-kv-smoothing", str(SMOOTHING)),
    ),
}
WAYS: dict[str, tuple[str, dict[str, str]]] = {
    "fetch": ("fetch", {}),
    "fetch-calibrated": ("fetch", {}),
    "drop": ("drop", {}),
    "drop-as-a-device-does-calibrated": ("drop", {"SGLANG_OASIS_DEVICE_PATH": "1"}),
}


class Served(NamedTuple):
    """One request of real text, and what the server recorded of it."""

    policy: str
    output_ids: list[int]
    top_logprobs: list[dict[int, float]]
    """Per output token: token id -> log-probability, for the sampled token and the most probable ones."""
    steps: list[StepSelection]
    """Step `i` processed `output_ids[i]` and gave `top_logprobs[i + 1]`."""

    @property
    def selected(self) -> Tensor:
        """int32 `[layers, steps, H, K]`."""
        return torch.stack([step.selected for step in self.steps], dim=1)


class Replayed(NamedTuple):
    """The reference, following the served request."""

    prompt: PrefilledPrompt
    sparse: Decoded
    dense: Tensor
    """`[steps, vocab]`: log-probabilities had every block been attended."""
    deciding_scores: Tensor
    """`[layers, steps, H, M]`: the scores the policy says each step's blocks are chosen by."""


@functools.cache
def prompt_ids() -> list[int]:
    return real_text_tokens(AutoTokenizer.from_pretrained(reference_model_path()), PROMPT_TOKENS)


def any_calibration(file: Path) -> Path:
    """Bounds are the same whatever they are relative to; relative to zero and powers of two they round alike, too."""
    config, rng = AutoConfig.from_pretrained(reference_model_path()), torch.Generator().manual_seed(0)
    shape = 2, config.num_key_value_heads, config.hidden_size // config.num_attention_heads
    scales = [torch.randint(-1, 2, shape, generator=rng).float().exp2() for _ in range(config.num_hidden_layers)]
    layers = [KeyStatistics(torch.zeros(shape[1:]), *scale) for scale in scales]
    key = model_hash(reference_model_path())
    Calibration(key, BLOCK_SIZE, layers, torch.ones(len(layers)), 0.0, 0.0, 0, 0).save(file)
    return file


@pytest.fixture(scope="module", params=WAYS)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Served:
    """The server is gone when this returns: it would compete with the reference for the cores."""
    policy, environment = WAYS[request.param]
    trace: Path = tmp_path_factory.mktemp(f"trace_{policy}")
    calibration = "none"
    if request.param.endswith("calibrated"):
        calibration = str(any_calibration(tmp_path_factory.mktemp("calibration") / "any.safetensors"))
    flags = (
        *("--enable-lookahead-kv", "--dtype", "float32"),
        *("--lookahead-kv-budget-tokens", str(BUDGET_TOKENS), "--lookahead-kv-source", "last-query"),
        *("--lookahead-kv-selector", "minmax", "--lookahead-kv-summary-dtype", "bf16"),
        *("--lookahead-kv-sink-tokens", "0", "--lookahead-kv-host-gb", "1.5", "--lookahead-kv-device-gb", "1.5"),
        *("--lookahead-kv-calibration", calibration),
        *POLICIES[policy],
    )
    with launch_server(*flags, env={"SGLANG_OASIS_TRACE_DIR": str(trace), **environment}) as server:
        response = server.generate(
            prompt_ids(),
            max_new_tokens=DECODE_STEPS + 1,
            rid=f"reference-{policy}",
            sampling={"ignore_eos": True},
            return_logprob=True,
            top_logprobs_num=TOP_LOGPROBS,
            logprob_start_len=-1,
        )
    meta = response["meta_info"]
    sampled, likeliest = meta["output_token_logprobs"], meta["output_top_logprobs"]
    top_logprobs = [
        {token: logprob for logprob, token, _ in [one, *many]} for one, many in zip(sampled, likeliest, strict=True)
    ]
    steps = load_trace(trace, f"reference-{policy}")[:DECODE_STEPS]
    assert len(top_logprobs) == DECODE_STEPS + 1, "the request did not run to its length"
    assert min(map(len, top_logprobs)) >= TOP_LOGPROBS
    assert len(steps) == DECODE_STEPS, "not every decode step was recorded"
    assert {step.block_size for step in steps} == {BLOCK_SIZE}
    return Served(policy, response["output_ids"], top_logprobs, steps)


@pytest.fixture(scope="module")
def prefilled() -> tuple[SparseReference, PrefilledPrompt]:
    """Both policies share the prompt: half a minute of prefill, paid once."""
    reference = SparseReference.from_pretrained(reference_model_path())
    return reference, reference.prefill(prompt_ids())


@pytest.fixture(scope="module")
def replayed(served: Served, prefilled: tuple[SparseReference, PrefilledPrompt]) -> Replayed:
    reference, prompt = prefilled
    processed = served.output_ids[:DECODE_STEPS]
    sparse = reference.decode_recorded(prompt, processed, served.steps, scored_ahead=served.policy == "drop")
    deciding = sparse.scores
    if served.policy == "drop":
        first = reference.prompt_scores(
            prompt, first_local_block=served.steps[0].first_local_block, block_size=BLOCK_SIZE
        )
        first = pad(first, (0, deciding.shape[-1] - first.shape[-1]), value=float("-inf"))
        deciding = smoothed(torch.cat([first[:, None], deciding[:, :-1]], dim=1))
    return Replayed(prompt, sparse, reference.decode_dense(prompt, processed), deciding)


def smoothed(scores: Tensor) -> Tensor:
    """The averages of scores [layers, steps, H, M] over the steps; a block that was no candidate has none (-inf)."""
    averages = [scores[:, 0]]
    for now in scores.unbind(1)[1:]:
        blended = SMOOTHING * averages[-1] + (1 - SMOOTHING) * now
        averages.append(torch.maximum(torch.where(averages[-1].isinf(), now, blended), now / ESCAPE))
    return torch.stack(averages, dim=1)


def largest_difference(top_logprobs: list[dict[int, float]], expected: Tensor) -> float:
    """Over the tokens the server reported; `expected` is `[steps, vocab]`."""
    differences = [
        (torch.tensor(list(served.values())) - row[list(served)]).abs().max()
        for served, row in zip(top_logprobs, expected, strict=True)
    ]
    return float(torch.stack(differences).max())


def test_prefill_is_dense_and_exact(served: Served, replayed: Replayed) -> None:
    assert largest_difference(served.top_logprobs[:1], replayed.prompt.logprobs[None]) < LOGPROB_TOLERANCE


def test_decode_logprobs_equal_the_reference_on_the_same_blocks(served: Served, replayed: Replayed) -> None:
    assert largest_difference(served.top_logprobs[1:], replayed.sparse.logprobs) < LOGPROB_TOLERANCE


def test_selected_blocks_are_the_top_k_of_the_deciding_query(served: Served, replayed: Replayed) -> None:
    scores, selected = replayed.deciding_scores, served.selected
    wrong = (~selection_is_top_k(scores, selected, WIDE_TIE)).nonzero().tolist()
    assert not wrong, f"{len(wrong)} (layer, step, KV head) did not attend to a top-K: {wrong[:10]}"
    assert selection_is_top_k(scores, selected, NARROW_TIE).float().mean() >= FEWEST_NARROW

    blocks = scores.shape[-1]
    expected = membership(top_k(scores, selected.shape[-1]), blocks)
    identical = (expected * membership(selected, blocks)).sum() / expected.sum()
    assert identical >= FEWEST_IDENTICAL


def test_local_blocks_are_the_recent_and_the_open_one(served: Served) -> None:
    for step in served.steps:
        open_block = (step.seq_len - 1) // BLOCK_SIZE
        assert step.first_local_block == open_block - 1


def test_the_budget_is_kept_and_used(served: Served) -> None:
    for step in served.steps:
        assert ((step.selected >= 0).sum(-1) == BUDGET_TOKENS // BLOCK_SIZE).all()
        assert (step.selected < step.first_local_block).all()
        assert (step.attended_tokens < step.seq_len / 4).all()


def test_dense_attention_or_the_other_policys_blocks_would_not_pass(served: Served, replayed: Replayed) -> None:
    """Without this the tests above could pass on a server that ignores its selection."""
    assert largest_difference(served.top_logprobs[1:], replayed.dense) > 10 * LOGPROB_TOLERANCE
    current = replayed.sparse.scores[:, 1:]
    previous = replayed.sparse.scores[:, :-1]
    other = previous if served.policy == "fetch" else current
    assert selection_is_top_k(other, served.selected[:, 1:], WIDE_TIE).float().mean() < 0.5
