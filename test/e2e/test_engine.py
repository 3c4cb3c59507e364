"""The offline engine takes the flags as keywords and answers as the server does."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from sglang_oasis.reference_model import truncated_model_path
from sglang_oasis.testing.processes import run
from sglang_oasis.testing.server import PASSIVE_WAITING, Server
from test.e2e.small_pool import BUDGET, CONTEXT, LAYERS, text

pytestmark = pytest.mark.e2e

ENGINE_TIMEOUT = 180.0
SCRIPT = """
import json, sys
import sglang

if __name__ == "__main__":
    request = json.loads(sys.argv[1])
    engine = sglang.Engine(model_path=request["model"], dtype="float32", enable_lookahead_kv=True, **request["flags"])
    try:
        answer = engine.generate(input_ids=request["prompt"], sampling_params={"max_new_tokens": 16, "temperature": 0})
        try:
            engine.generate(input_ids=[5, -1])
        except ValueError as error:
            refusal = str(error)
        state = engine.get_server_info()["internal_states"][0]["lookahead_kv"]
        print("ANSWER", json.dumps({"ids": answer["output_ids"], "config": state["config"], "refusal": refusal}))
    finally:
        engine.shutdown()
"""


def test_the_engine_answers_and_refuses_as_the_server_does(small_pool_server: Server, tmp_path: Path) -> None:
    prompt = text(700, 500)
    flags = {
        "lookahead_kv_budget_tokens": BUDGET,
        "lookahead_kv_miss_policy": "fetch",
        "lookahead_kv_host_gb": 0.2,
        "lookahead_kv_device_gb": 0.2,
        "context_length": CONTEXT,
    }
    request = {"model": str(truncated_model_path(LAYERS)), "flags": flags, "prompt": prompt}
    script = tmp_path / "ask.py"
    script.write_text(SCRIPT)
    exit_code, output = run(
        [str(script), json.dumps(request)], environment={**PASSIVE_WAITING, **os.environ}, timeout=ENGINE_TIMEOUT
    )
    assert exit_code == 0, output
    (line,) = [line for line in output.splitlines() if line.startswith("ANSWER ")]
    answer = json.loads(line.removeprefix("ANSWER "))
    assert answer["ids"] == small_pool_server.generate(prompt, max_new_tokens=16)["output_ids"]
    assert answer["config"]["budget_tokens"] == BUDGET
    assert answer["refusal"].startswith("each token in input_ids must be between 0 and")
