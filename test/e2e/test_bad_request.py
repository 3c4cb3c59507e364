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
    "empty text": ("/generate", {"text": ""}, "The prompt is empty"),
    "an empty one of two": ("/generate", {"text": ["a", ""]}, "The prompt is empty"),
    "unknown token": (
        "/generate",
        {"input_ids": [5, 1000000]},
        "token 1000000 in input_ids is not possible: give 0 to",
    ),
    "negative token": ("/generate", {"input_ids": [5, -1]}, "token -1 in input_ids is not possible: give 0 to 49151"),
    "top_logprobs_num": (
        "/generate",
        {"text": "a b", "return_logprob": True, "top_logprobs_num": 100000},
        "top_logprobs_num 100000 is not possible: give 0 to 49152",
    ),
    "logprobs of the whole vocabulary": (
        "/generate",
        {**sampling(max_new_tokens=1000), "return_logprob": True, "top_logprobs_num": 49152},
        "top_logprobs_num 49152 at 1000 positions is not possible: give at most 4194",
    ),
    "stop_token_ids": (
        "/generate",
        {"text": "a", "sampling_params": {"stop_token_ids": [1000000], "min_new_tokens": 3}},
        "token 1000000 in stop_token_ids is not possible: give 0 to 49151",
    ),
    "stop_regex": (
        "/generate",
        sampling(stop_regex="((("),
        "stop_regex '(((' is not possible: missing ), unterminated subpattern at position 2",
    ),
    "stop_regex without end": (
        "/generate",
        # Token 81 is "a": after thirty of them the search would take longer than the server is given.
        sampling(stop_regex="(a+)+b", logit_bias={"81": 1e4}, max_new_tokens=64),
        "the search takes longer than 1 s",
    ),
    "n": ("/generate", sampling(n=10**8), "n 100000000 is not possible: give 1 to 4096"),
    "n of many": (
        "/generate",
        {"text": ["a"] * 8, "sampling_params": {"n": 1000}},
        "n 1000 is not possible: give 1 to 512",
    ),
    "top_k": (
        "/generate",
        sampling(top_k=2**40, temperature=1),
        "top_k 1099511627776 is not possible: give 1 to 1073741824",
    ),
    "temperature": ("/generate", sampling(temperature=1e300), "temperature 1e+300 is not possible: give 0 to 3.4e+38"),
    "repetition_penalty": ("/generate", sampling(repetition_penalty=1e-40), "repetition_penalty 1e-40 is not possible"),
    "min_new_tokens": (
        "/generate",
        sampling(max_new_tokens=None, min_new_tokens=2**40),
        "min_new_tokens 1099511627776 is not possible",
    ),
    "logit_bias": ("/generate", sampling(logit_bias={"5": 1e39}), "logit_bias of token 5 1e+39 is not possible"),
    "logprob_start_len": (
        "/generate",
        {**sampling(), "return_logprob": True, "logprob_start_len": -7},
        "logprob_start_len -7 is not possible",
    ),
    "fewer settings than prompts": (
        "/generate",
        {"text": ["a", "b"], "sampling_params": [FEW]},
        "lists have one entry per prompt",
    ),
    "settings in a list": ("/generate", {"text": "a", "sampling_params": [FEW]}, "The request cannot be read"),
    "session_params": ("/generate", {**sampling(), "session_params": {"x": "y"}}, "Unexpected keyword argument 'x'"),
    "custom_labels": ("/generate", {**sampling(), "custom_labels": {"x": "y"}}, "custom_labels 'x' is not possible"),
    "completion: empty prompt": ("/v1/completions", completion(prompt=""), "Prompt cannot be empty"),
    "completion: negative token": ("/v1/completions", completion(prompt=[5, -1]), "token -1 in input_ids"),
    "completion: logprobs": ("/v1/completions", completion(logprobs=100000), "top_logprobs_num 100000 is not possible"),
    "completion: stop_regex": ("/v1/completions", completion(stop_regex="((("), "stop_regex '(((' is not possible"),
    "completion: stop_token_ids": (
        "/v1/completions",
        completion(stop_token_ids=[1000000], min_tokens=1),
        "token 1000000 in stop_token_ids",
    ),
    "chat: n": ("/v1/chat/completions", chat(n=10**8), "n 100000000 is not possible: give 1 to 4096"),
    "chat: temperature": ("/v1/chat/completions", chat(temperature=1e300), "temperature 1e+300 is not possible"),
    "chat: stop_token_ids": (
        "/v1/chat/completions",
        chat(stop_token_ids=[-1], min_tokens=1),
        "token -1 in stop_token_ids",
    ),
    "chat: input_ids": ("/v1/chat/completions", chat(input_ids=[10**7]), "token 10000000 in input_ids"),
    "slow_down": ("/slow_down", {"forward_sleep_time": 1e9}, "forward_sleep_time 1000000000.0 is not possible"),
    "release_memory_occupation": ("/release_memory_occupation", {}, "start it with --enable-memory-saver"),
    "resume_memory_occupation": ("/resume_memory_occupation", {}, "start it with --enable-memory-saver"),
    "record experts": ("/start_expert_distribution_record", {}, "start it with --expert-distribution-recorder-mode"),
    "log level": (
        "/configure_logging",
        {"log_level": "xx"},
        "The logging cannot be configured so: Unknown level: 'XX'",
    ),
    "backend of a GPU": (
        "/init_weights_update_group",
        {"master_address": "localhost", "master_port": 1, "rank_offset": 0, "world_size": 1, "backend": "nccl"},
        "backend 'nccl' is not available here: give gloo on a CPU",
    ),
    "address of nobody": (
        "/init_weights_update_group",
        {"master_address": "a..b", "master_port": 1, "rank_offset": 0, "world_size": 1, "backend": "gloo"},
        "master_address 'a..b' is not possible",
    ),
    "detokenize": ("/v1/detokenize", {"model": "default", "tokens": [5, -1]}, "tokens -1 is not possible"),
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
        "profile_by_stage is not possible without num_steps",
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
    assert "token -1 in input_ids is not possible" in answer.text
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
