"""Bad requests: status 400 and one sentence that names the fault; the server serves on, and nothing is left behind."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests

from sglang_oasis.reference_model import truncated_model_path
from sglang_oasis.testing.server import Server, launch_server
from test.e2e.small_pool import LAYERS, assert_baseline

pytestmark = pytest.mark.e2e

DENSE = (
    *("--attention-backend", "oasis_cpu", "--dtype", "float32", "--context-length", "1024"),
    *("--max-total-tokens", "2560", "--max-running-requests", "16", "--sleep-on-idle", "--enable-metrics"),
)
STOCK = ("--context-length", "1024", "--max-total-tokens", "2560", "--max-running-requests", "4", "--sleep-on-idle")
FEW: dict[str, Any] = {"max_new_tokens": 2, "temperature": 0}


def sampling(**parameters: Any) -> dict[str, Any]:
    return {"text": "a b c", "sampling_params": {**FEW, **parameters}}


def completion(**fields: Any) -> dict[str, Any]:
    return {"model": "default", "prompt": "a b c", "max_tokens": 2, **fields}


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": "default", "messages": [{"role": "user", "content": "Hi."}], "max_tokens": 2, **fields}


# Name -> (path, body, what the refusal says).
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "empty text": ("/generate", {"text": ""}, "The prompt must have at least one token"),
    "an empty one of two": ("/generate", {"text": ["a", ""]}, "The prompt must have at least one token"),
    "unknown token": (
        "/generate",
        {"input_ids": [5, 1000000]},
        "each token in input_ids must be between 0 and",
    ),
    "negative token": (
        "/generate",
        {"input_ids": [5, -1]},
        "each token in input_ids must be between 0 and 49151, got -1",
    ),
    "top_logprobs_num": (
        "/generate",
        {"text": "a b", "return_logprob": True, "top_logprobs_num": 100000},
        "top_logprobs_num must be between 0 and 49152, got 100000",
    ),
    "logprobs of the whole vocabulary": (
        "/generate",
        {**sampling(max_new_tokens=1000), "return_logprob": True, "top_logprobs_num": 49152},
        "top_logprobs_num must be at most 4194 at 1000 positions, got 49152",
    ),
    "stop_token_ids": (
        "/generate",
        {"text": "a", "sampling_params": {"stop_token_ids": [1000000], "min_new_tokens": 3}},
        "each token in stop_token_ids must be between 0 and 49151, got 1000000",
    ),
    "stop_regex": (
        "/generate",
        sampling(stop_regex="((("),
        "stop_regex '(((' is invalid: missing ), unterminated subpattern at position 2",
    ),
    "stop_regex without end": (
        "/generate",
        # Token 81 is "a": after thirty of them the search would take longer than the server is given.
        sampling(stop_regex="(a+)+b", logit_bias={"81": 1e4}, max_new_tokens=64),
        "the search takes longer than 1 s",
    ),
    "n": ("/generate", sampling(n=10**8), "n must be between 1 and 4096, got 100000000"),
    "n of many": (
        "/generate",
        {"text": ["a"] * 8, "sampling_params": {"n": 1000}},
        "n must be between 1 and 512, got 1000",
    ),
    "top_k": (
        "/generate",
        sampling(top_k=2**40, temperature=1),
        "top_k must be between 1 and 1073741824, got 1099511627776",
    ),
    "temperature": ("/generate", sampling(temperature=1e300), "temperature must be between 0 and 3.4e+38, got 1e+300"),
    "repetition_penalty": (
        "/generate",
        sampling(repetition_penalty=1e-40),
        "repetition_penalty must be between 1e-06 and 2, got 1e-40",
    ),
    "min_new_tokens": (
        "/generate",
        sampling(max_new_tokens=None, min_new_tokens=2**40),
        "min_new_tokens must be between 0 and 2147483647, got 1099511627776",
    ),
    "logit_bias": (
        "/generate",
        sampling(logit_bias={"5": 1e39}),
        "logit_bias of token 5 must be between -1e+30 and 1e+30, got 1e+39",
    ),
    "logprob_start_len": (
        "/generate",
        {**sampling(), "return_logprob": True, "logprob_start_len": -7},
        "logprob_start_len must be between -1 and 2147483647, got -7",
    ),
    "fewer settings than prompts": (
        "/generate",
        {"text": ["a", "b"], "sampling_params": [FEW]},
        "lists have one entry per prompt",
    ),
    "settings in a list": ("/generate", {"text": "a", "sampling_params": [FEW]}, "The request cannot be read"),
    "session_params": ("/generate", {**sampling(), "session_params": {"x": "y"}}, "Unexpected keyword argument 'x'"),
    "custom_labels": (
        "/generate",
        {**sampling(), "custom_labels": {"x": "y"}},
        "custom_labels must be labels of --tokenizer-metrics-allowed-custom-labels, got 'x'",
    ),
    "completion: empty prompt": ("/v1/completions", completion(prompt=""), "Prompt cannot be empty"),
    "completion: negative token": (
        "/v1/completions",
        completion(prompt=[5, -1]),
        "each token in input_ids must be between 0 and 49151, got -1",
    ),
    "completion: logprobs": (
        "/v1/completions",
        completion(logprobs=100000),
        "top_logprobs_num must be between 0 and 49152, got 100000",
    ),
    "completion: stop_regex": ("/v1/completions", completion(stop_regex="((("), "stop_regex '(((' is invalid"),
    "completion: stop_token_ids": (
        "/v1/completions",
        completion(stop_token_ids=[1000000], min_tokens=1),
        "each token in stop_token_ids must be between 0 and 49151, got 1000000",
    ),
    "chat: n": ("/v1/chat/completions", chat(n=10**8), "n must be between 1 and 4096, got 100000000"),
    "chat: temperature": (
        "/v1/chat/completions",
        chat(temperature=1e300),
        "temperature must be between 0 and 3.4e+38, got 1e+300",
    ),
    "chat: stop_token_ids": (
        "/v1/chat/completions",
        chat(stop_token_ids=[-1], min_tokens=1),
        "each token in stop_token_ids must be between 0 and 49151, got -1",
    ),
    "chat: input_ids": (
        "/v1/chat/completions",
        chat(input_ids=[10**7]),
        "each token in input_ids must be between 0 and 49151, got 10000000",
    ),
    "slow_down": (
        "/slow_down",
        {"forward_sleep_time": 1e9},
        "forward_sleep_time must be between 0 and 60, got 1000000000.0",
    ),
    "release_memory_occupation": ("/release_memory_occupation", {}, "start it with --enable-memory-saver"),
    "resume_memory_occupation": ("/resume_memory_occupation", {}, "start it with --enable-memory-saver"),
    "record experts": ("/start_expert_distribution_record", {}, "start it with --expert-distribution-recorder-mode"),
    "log level": (
        "/configure_logging",
        {"log_level": "xx"},
        "The logging cannot be configured this way: Unknown level: 'XX'",
    ),
    "backend of a GPU": (
        "/init_weights_update_group",
        {"master_address": "localhost", "master_port": 1, "rank_offset": 0, "world_size": 1, "backend": "nccl"},
        "backend must be one that this torch has, such as gloo on a CPU, got 'nccl'",
    ),
    "address of nobody": (
        "/init_weights_update_group",
        {"master_address": "a..b", "master_port": 1, "rank_offset": 0, "world_size": 1, "backend": "gloo"},
        "master_address must be a host that can be resolved, got 'a..b'",
    ),
    "detokenize": ("/v1/detokenize", {"model": "default", "tokens": [5, -1]}, "tokens must be between 0 and"),
    "log level of requests": (
        "/configure_logging",
        {"log_requests": True, "log_requests_level": 99},  # SGLang keeps it, and fails on each request that follows
        "Invalid --log-requests-level: self.log_requests_level=99",
    ),
    "tool parser": (
        "/parse_function_call",
        {"text": "a", "tools": [], "tool_call_parser": "nope"},
        "Unsupported tool_call_parser: nope",
    ),
    "reasoning parser": ("/separate_reasoning", {"text": "a", "reasoning_parser": "nope"}, "nope"),
    "chat: template": (
        "/v1/chat/completions",
        chat(chat_template_kwargs={"messages": 5}),
        "The request cannot be read",
    ),
    "weights that are none": (
        "/update_weights_from_tensor",
        {"serialized_named_tensors": ["AAAA"]},
        "must run between begin_weight_update() and end_weight_update()",
    ),
    "weights to nobody": (
        "/send_weights_to_remote_instance",
        {"master_address": "localhost", "ports": "1"},
        "SendWeightsToRemoteInstanceReqInput failed (KeyError",
    ),
    "profiler of AMD": ("/start_profile", {"activities": ["RPD"]}, "The profile failed (ModuleNotFoundError"),
    "profile of a GPU": ("/start_profile", {"activities": ["MEM"]}, "The profile failed (AttributeError"),
    "endless profile": (
        "/start_profile",
        {"profile_by_stage": True},
        "profile_by_stage needs num_steps",
    ),
    "no profile": ("/stop_profile", {}, "Profiling is not in progress"),
}


def refusal(server: Server, path: str, body: dict[str, Any]) -> str:
    answer = requests.post(f"{server.url}{path}", json=body, timeout=60)
    assert answer.status_code == 400, answer.text
    return json.dumps(answer.json(), ensure_ascii=False)


def assert_serves(server: Server) -> None:
    assert server.generate("Once upon a time", max_new_tokens=2)["meta_info"]["completion_tokens"] == 2


@pytest.mark.parametrize("name", REFUSED)
def test_a_bad_request_is_refused_with_one_sentence(small_pool_server: Server, name: str) -> None:
    path, body, sentence = REFUSED[name]
    assert sentence in refusal(small_pool_server, path, body)
    assert_serves(small_pool_server)


def test_refusals_leave_nothing_behind(small_pool_server: Server) -> None:
    for path, body, _ in REFUSED.values():
        refusal(small_pool_server, path, body)
    assert_baseline(small_pool_server)


def test_a_stream_says_why_it_is_refused(small_pool_server: Server) -> None:
    answer = requests.post(f"{small_pool_server.url}/generate", json={"input_ids": [5, -1], "stream": True}, timeout=60)
    assert "each token in input_ids must be between 0 and 49151, got -1" in answer.text
    assert_baseline(small_pool_server)


@pytest.fixture(scope="module")
def dense_server() -> Iterator[Server]:
    with launch_server(*DENSE, env={"OMP_NUM_THREADS": "1"}, model=truncated_model_path(LAYERS)) as server:
        yield server


def test_the_dense_backend_refuses_the_same(dense_server: Server) -> None:
    for path, body, sentence in REFUSED.values():
        assert sentence in refusal(dense_server, path, body)
    assert_serves(dense_server)


def profile(server: Server, folder: Path) -> None:
    """Profile three steps, and look at the trace."""
    answer = server.post("/start_profile", num_steps=3, activities=["CPU"], output_dir=str(folder))
    assert answer.ok, answer.text
    server.generate("Once upon a time", max_new_tokens=8)
    (trace,) = folder.glob("*.trace.json.gz")
    with gzip.open(trace) as file:
        names = {event.get("name") for event in json.load(file)["traceEvents"]}
    assert "aten::linear" in names


def test_a_profile_is_written(small_pool_server: Server, tmp_path: Path) -> None:
    profile(small_pool_server, tmp_path)
    assert_baseline(small_pool_server)


def test_a_profile_that_cannot_be_written_ends_nothing(small_pool_server: Server, tmp_path: Path) -> None:
    nowhere = tmp_path / "file"
    nowhere.touch()
    assert small_pool_server.post("/start_profile", num_steps=1, output_dir=str(nowhere / "folder")).ok
    small_pool_server.generate("Once upon a time", max_new_tokens=8)
    profile(small_pool_server, tmp_path / "somewhere")


def test_without_the_flag_the_platform_profiles_too(tmp_path: Path) -> None:
    with launch_server(*STOCK, env={"OMP_NUM_THREADS": "1"}, model=truncated_model_path(LAYERS)) as server:
        profile(server, tmp_path)
