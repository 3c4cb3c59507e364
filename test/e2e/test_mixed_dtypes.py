"""On a CPU with slow bfloat16 products `--dtype auto` computes in float32 on a bfloat16 KV cache, of the same capacity.

The reference is Hugging Face in float32 whose keys and values are rounded to bfloat16. The CPU is made slow: without
its AVX-512 instructions it has no products of bfloat16 numbers.
"""

from __future__ import annotations

import functools
import re
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from sglang_oasis.reference_model import truncated_model_path
from sglang_oasis.testing.server import Server, launch_server
from sglang_oasis.testing.sparse_reference import PrefilledPrompt, SparseReference
from sglang_oasis.testing.trace import load_trace
from test.e2e.small_pool import BUDGET, CHUNK, CONTEXT, LAYERS, PAGE, text
from test.e2e.sources import write_untrained_head

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(not torch.cpu.get_capabilities().get("avx2"), reason="no AVX2 to fall back to"),
]

SLOW_BFLOAT16 = {"ONEDNN_MAX_CPU_ISA": "AVX2", "SGLANG_OASIS_CPU_ISA": "avx2", "OMP_NUM_THREADS": "1"}
HOST_GB, HEADS, HEAD_DIM = 0.05, 3, 64
SMALL = (
    *("--context-length", str(CONTEXT), "--chunked-prefill-size", str(CHUNK), "--max-running-requests", "4"),
    *("--random-seed", "7"),
)
TOKENS = 24
PROMPTS = {"within the budget": (300, 100), "beyond the budget": (2000, 701)}  # (first token, length) in the corpus
TOLERANCE = 2e-3
"""Of log-probabilities, on average: a number that is nearly halfway between two of bfloat16 is rounded to either. Keys
and values that differ by one in a million give 0.0007 here, an exact cache 0.004."""


class Served(NamedTuple):
    """An answer: its tokens, and per token the log-probabilities of the likeliest ones."""

    ids: list[int]
    likeliest: list[dict[int, float]]

    def distance(self, logprobs: Tensor) -> float:
        """Mean difference to [tokens, vocab] log-probabilities."""
        assert len(logprobs) == len(self.likeliest) == TOKENS
        return statistics.mean(
            abs(float(row[token]) - logprob)
            for row, found in zip(logprobs, self.likeliest, strict=True)
            for token, logprob in found.items()
        )


def ask(server: Server, prompt: list[int], rid: str) -> Served:
    response = server.generate(
        prompt,
        max_new_tokens=TOKENS,
        rid=rid,
        sampling={"ignore_eos": True},
        return_logprob=True,
        top_logprobs_num=10,
    )
    meta = response["meta_info"]
    likeliest = [{token: logprob for logprob, token, _ in many} for many in meta["output_top_logprobs"]]
    return Served(response["output_ids"], likeliest)


@functools.cache
def reference(kv_dtype: torch.dtype) -> SparseReference:
    return SparseReference.from_pretrained(truncated_model_path(LAYERS), kv_dtype)


@functools.cache
def prefilled(name: str, kv_dtype: torch.dtype) -> PrefilledPrompt:
    return reference(kv_dtype).prefill(text(*PROMPTS[name]))


def dense_logprobs(name: str, ids: list[int], kv_dtype: torch.dtype) -> Tensor:
    prompt = prefilled(name, kv_dtype)
    return torch.cat([prompt.logprobs[None], reference(kv_dtype).decode_dense(prompt, ids[:-1])])


def assert_computes_in_float32_on_bfloat16(server: Server) -> None:
    info = server.get("/server_info").json()
    assert (info["dtype"], info["kv_cache_dtype"]) == ("float32", "bfloat16")
    found = re.findall(
        r"multiplies bfloat16 matrices at .* computes in float32 and keeps K and V in bfloat16", log(server)
    )
    assert len(found) == 1


def assert_near_the_rounded_one(distance: dict[torch.dtype, float]) -> None:
    """Distances to the reference with either cache."""
    assert distance[torch.bfloat16] < min(TOLERANCE, distance[torch.float32] / 2.5), distance


def log(server: Server) -> str:
    return server.log.read_text(errors="replace")


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("trace")


@pytest.fixture(scope="module")
def lookahead(trace: Path) -> Iterator[Server]:
    flags = (
        *("--enable-lookahead-kv", "--lookahead-kv-budget-tokens", str(BUDGET), "--lookahead-kv-miss-policy", "fetch"),
        *("--lookahead-kv-host-gb", str(HOST_GB), "--lookahead-kv-device-gb", "0.1"),
    )
    environment = {**SLOW_BFLOAT16, "SGLANG_OASIS_TRACE_DIR": str(trace), "SGLANG_OASIS_CHECK_INTEGRITY": "1"}
    with launch_server(*flags, *SMALL, env=environment, model=truncated_model_path(LAYERS)) as server:
        yield server


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """With a draft model, whose KV cache is a second pool."""
    head = write_untrained_head(tmp_path_factory.mktemp("head"))
    flags = (
        *("--attention-backend", "oasis_cpu", "--max-total-tokens", "4096"),
        *("--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", str(head)),
    )
    with launch_server(*flags, *SMALL, env=SLOW_BFLOAT16, model=truncated_model_path(LAYERS)) as server:
        yield server


def test_the_choice_is_told_once_in_the_log_in_the_server_info_and_in_the_start_up_block(lookahead: Server) -> None:
    assert_computes_in_float32_on_bfloat16(lookahead)
    assert re.search(r"dtype +computes in float32, keeps K and V in bfloat16\n", log(lookahead))


def test_the_capacity_is_that_of_a_bfloat16_cache(lookahead: Server) -> None:
    summary = HEAD_DIM + 4
    page = LAYERS * HEADS * (2 * PAGE * HEAD_DIM * torch.bfloat16.itemsize + summary)
    expected = HOST_GB * 1e9 / page * PAGE
    capacity = lookahead.get("/server_info").json()["max_total_num_tokens"]
    assert capacity == pytest.approx(expected, rel=0.01)
    stats = lookahead.stats()
    assert stats["host_tokens"]["capacity"] == capacity
    assert stats["bytes"]["host_capacity"] == pytest.approx(HOST_GB * 1e9, rel=0.01)


@pytest.mark.parametrize("name", PROMPTS)
def test_answers_equal_the_reference_with_rounded_keys_and_values(lookahead: Server, trace: Path, name: str) -> None:
    served = ask(lookahead, text(*PROMPTS[name]), rid=name)
    steps = load_trace(trace, name)[: TOKENS - 1]
    distance: dict[torch.dtype, float] = {}
    for kv_dtype in (torch.bfloat16, torch.float32):
        prompt = prefilled(name, kv_dtype)
        decoded = reference(kv_dtype).decode_recorded(prompt, served.ids[:-1], steps)
        distance[kv_dtype] = served.distance(torch.cat([prompt.logprobs[None], decoded.logprobs]))
    assert_near_the_rounded_one(distance)
    attended = {int(step.attended_tokens.max()) for step in steps}
    assert (max(attended) < PROMPTS[name][1]) == (name == "beyond the budget")


@pytest.mark.parametrize("name", PROMPTS)
def test_the_dense_backend_does_the_same_with_a_draft_model(dense: Server, name: str) -> None:
    assert_computes_in_float32_on_bfloat16(dense)
    served = ask(dense, text(*PROMPTS[name]), rid=name)
    assert_near_the_rounded_one(
        {dtype: served.distance(dense_logprobs(name, served.ids, dtype)) for dtype in (torch.bfloat16, torch.float32)}
    )
