"""Each tensor-parallel rank keeps its own heads, tiers and head maps, and the answers stay the same."""

from __future__ import annotations

import pytest

from sglang_oasis.reference_model import truncated_model_path
from sglang_oasis.testing.idle import MOST_OF_A_CORE, idle_share, polling_threads
from sglang_oasis.testing.server import Server, launch_server
from test.e2e.small_pool import ENVIRONMENT, FLAGS, LAYERS, assert_same_answer, finish_type, text

pytestmark = pytest.mark.e2e

BINDING = {"SGLANG_CPU_OMP_THREADS_BIND": "0|0|0"}  # SGLang wants to be told when ranks share a NUMA node


def answers(server: Server) -> list[dict]:
    prompts = [text(0, 20), text(500, 300), text(500, 700)]
    given = [server.generate(prompt, max_new_tokens=20, return_logprob=True) for prompt in prompts]
    stopped = server.generate(prompts[1], max_new_tokens=20, return_logprob=True, sampling={"stop_regex": "[aeiou]"})
    assert finish_type(stopped) == "stop"
    return [*given, stopped]


@pytest.mark.parametrize("driven_by_device", ["0", "1"], ids=["host", "device"])
def test_three_ranks_with_one_kv_head_each_answer_as_one_rank_does(
    small_pool_server: Server, driven_by_device: str
) -> None:
    expected = answers(small_pool_server)
    flags = (*FLAGS, "--lookahead-kv-audit-interval", "0", "--tp", "3")
    environment = {**ENVIRONMENT, **BINDING, "SGLANG_OASIS_DEVICE_PATH": driven_by_device}
    with launch_server(*flags, env=environment, model=truncated_model_path(LAYERS)) as server:
        for ours, theirs in zip(answers(server), expected, strict=True):
            assert_same_answer(ours, theirs)
        assert server.stats()["counters"]["blocks_urgent"] > 0, "no rank had to fetch"
        if driven_by_device == "0":
            assert polling_threads(server) == 3, "one per rank"
            assert idle_share(server, seconds=10) < MOST_OF_A_CORE
