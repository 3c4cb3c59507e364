"""The output tokens of a request when its next token is sampled, including those SGLang has not yet processed.

SGLang prepares a step, with overlap, before it has processed the result of the one before; penalties and custom logit
processors that look at `Req.output_ids` then miss the newest tokens, and with speculation a number of them that depends
on what was accepted.

Read from sglang 0.5.23: `managers/scheduler.Scheduler.event_loop_overlap` (result_queue),
`managers/scheduler_components/batch_result_processor._resolve_spec_v2_tokens` (where a result's tokens are),
`managers/schedule_batch.Req` (output_ids, and `__req__` in the custom parameters).
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from typing import Any

REQUEST = "__req__"
"""The key under which a custom logit processor finds its request in its custom parameters."""


def output_tokens(batch: Any, unprocessed: Iterable[tuple[Any, Any]]) -> list[array[int]]:
    """Return the output tokens of each request of a batch that is about to run.

    Args:
        batch: a ScheduleBatch.
        unprocessed: (ScheduleBatch, GenerationBatchResult) of each step whose tokens are not in `output_ids` yet.
    """
    known = {id(request): request.output_ids for request in batch.reqs}
    if not batch.forward_mode.is_extend():  # an earlier chunk of the prompt has given no token
        for before, result in unprocessed:
            for request, tokens in zip(before.reqs, _tokens_of(before, result), strict=True):
                if id(request) in known:
                    known[id(request)] = known[id(request)] + array("q", tokens)
    return [known[id(request)] for request in batch.reqs]


def _tokens_of(batch: Any, result: Any) -> list[list[int]]:
    """Return the tokens that a step gave each of its requests."""
    if result.copy_done is not None:
        result.copy_done.synchronize()
    tokens = result.next_token_ids.tolist()
    if batch.spec_algorithm.is_none() or batch.forward_mode.is_extend():
        return [[token] for token in tokens]
    width = result.speculative_output_stride or result.speculative_num_draft_tokens
    counts = result.accept_lens.tolist()
    return [tokens[i * width : i * width + count] for i, count in enumerate(counts)]


class RequestThen:
    """A request as it is when a token is sampled: all attributes except `output_ids` are those of the request."""

    def __init__(self, request: Any, output_ids: array[int]) -> None:
        self._request = request
        self.output_ids = output_ids

    def __getattr__(self, name: str) -> Any:
        return getattr(self._request, name)


def show(requests: Iterable[Any], histories: Iterable[array[int]]) -> None:
    """Let custom logit processors see these tokens as the requests' `output_ids`."""
    for request, tokens in zip(requests, histories, strict=True):
        params = request.sampling_params.custom_params
        if isinstance(params, dict) and REQUEST in params:
            seen = params[REQUEST]
            params[REQUEST] = RequestThen(seen._request if isinstance(seen, RequestThen) else seen, tokens)
