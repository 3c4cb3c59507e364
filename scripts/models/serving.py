"""Sends prompts to one engine with one model, as a user's program would."""

from __future__ import annotations

import multiprocessing
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from scripts.models.cases import CONTEXT, VOCABULARY, Case

BLOCK, BUDGET = 16, 64
TOP_LOGPROBS = 20
NEW_TOKENS = 13
PROMPTS: dict[str, list[int]] = {
    # Ids from a linear congruence: no two models need the same text, only no short cycle.
    name: [3 + (i * i * 31 + i * 7) % (VOCABULARY - 3) for i in range(length)]
    for name, length in (("below", 37), ("above", 301))
}
"""Prompts that end inside a block; the first one fits the budget, together with its answer."""


@dataclass(frozen=True)
class Way:
    """A way to serve.

    Attributes:
        engine: keyword arguments of the engine.
        environment: environment variables of the engine's processes.
        sparse: whether the selection past the budget is recorded, so that the reference can use it.
    """

    engine: dict[str, Any]
    environment: dict[str, str] = field(default_factory=dict)
    sparse: bool = False


LOOKAHEAD: dict[str, Any] = {
    "enable_lookahead_kv": True,
    "lookahead_kv_budget_tokens": BUDGET,
    "lookahead_kv_miss_policy": "fetch",
    "lookahead_kv_selector": "minmax",
    "lookahead_kv_summary_dtype": "bf16",
    "lookahead_kv_sink_tokens": 0,
    "lookahead_kv_host_gb": 0.1,
    "lookahead_kv_device_gb": 0.1,
}
CHECKED = {"SGLANG_OASIS_CHECK_INTEGRITY": "1"}
WAYS: dict[str, Way] = {
    "stock": Way({"attention_backend": "torch_native"}),
    "dense": Way({"attention_backend": "oasis_cpu"}),
    "lookahead": Way(LOOKAHEAD, CHECKED, sparse=True),
    "device": Way(LOOKAHEAD, {**CHECKED, "SGLANG_OASIS_DEVICE_PATH": "1"}, sparse=True),
}
ENGINE: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "skip_tokenizer_init": True,
    "context_length": CONTEXT,
    "max_total_tokens": 2 * CONTEXT,
    "max_running_requests": 2,
    "chunked_prefill_size": 128,
    "log_level": "warning",
}


def serve(case: Case, model: Path, way: Way, trace: Path) -> dict[str, Any]:
    """Serve a case's model, and let it answer all prompts.

    Returns:
        Per prompt: `rid`, `output_ids` and, per output token, the reported `logprobs` as [id, log-probability].
    """
    # A forked scheduler has already imported everything; a spawned one would need ten seconds for that.
    multiprocessing.set_start_method("fork", force=True)
    multiprocessing.set_start_method = lambda *args, **kwargs: None
    if way.sparse:
        os.environ["SGLANG_OASIS_TRACE_DIR"] = str(trace)
    os.environ.update(way.environment)
    import sglang

    renamed = {"trust_remote_code": True} if case.renamed else {}
    engine = sglang.Engine(model_path=str(model), **{**ENGINE, **way.engine, **renamed, **case.engine})
    try:
        return {name: _ask(engine, prompt) for name, prompt in PROMPTS.items()}
    finally:
        engine.shutdown()


def _ask(engine: Any, prompt: list[int]) -> dict[str, Any]:
    answer = engine.generate(
        input_ids=prompt,
        sampling_params={"max_new_tokens": NEW_TOKENS, "temperature": 0, "ignore_eos": True},
        return_logprob=True,
        top_logprobs_num=TOP_LOGPROBS,
        logprob_start_len=-1,
    )
    meta = answer["meta_info"]
    per_token = zip(meta["output_token_logprobs"], meta["output_top_logprobs"], strict=True)
    return {
        "rid": meta["id"],
        "output_ids": answer["output_ids"],
        "logprobs": [[[token, value] for value, token, _ in [one, *many]] for one, many in per_token],
    }
