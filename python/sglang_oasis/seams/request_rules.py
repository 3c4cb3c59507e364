"""What a request may say: the types and ranges that SGLang does not check and without which a scheduler ends.

Read from sglang 0.5.23: `managers/io_struct.TokenizedGenerateReqInput` and `sampling/sampling_params.SamplingParams`,
both msgspec structs. Their annotations are what the scheduler decodes with, so they are the types that are checked
here; the ranges are those of the tensors that the values end up in. A range that SGLang checks in
`SamplingParams.verify` is not repeated. Where upstream checks one of these, drop its line.
"""

from __future__ import annotations

import functools
import re
from array import array
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
import numpy as np

from sglang_oasis.errors import RequestRefused

INT64 = (-(2**63), 2**63 - 1)
INT32_MAX = 2**31 - 1
UINT32_MAX = 2**32 - 1  # of the tokenizers' token ids
FLOAT32_MAX = 3.4e38
MOST_ANSWERS = 4096
"""Answers of one request, prompts times `n`: each of them is set up before the first one is served."""
MOST_LOGPROBS = 2**22
"""Log-probabilities of one request, positions times `top_logprobs_num` times `n`: about 1 GB in Python objects."""
USUAL_LOGPROBS = 20
"""As many per position are never refused: OpenAI allows them, and a request with an open length is mostly short."""

SAMPLING_RANGES: dict[str, tuple[float, float]] = {
    "temperature": (0, FLOAT32_MAX),
    "top_k": (1, 2**30),  # SGLang's "all tokens"
    "repetition_penalty": (1e-6, 2),  # logits are divided by it
    "min_new_tokens": (0, INT32_MAX),
}
LOGIT_BIAS_RANGE = (-1e30, 1e30)  # finite also after the division by the smallest temperature
CONVERTED_BY_SGLANG = frozenset({"stop_token_ids", "watermark"})
"""Sampling parameters that may come in other types than they have on their way to the scheduler."""


def check_answers(prompts: int, sampling: Any) -> None:
    """Refuse a number of answers that would exhaust the memory before the first one is served.

    Args:
        prompts: prompts in the request.
        sampling: its sampling parameters, for all prompts or a list with those of each.

    Raises:
        RequestRefused: for `n`.
    """
    first = sampling[0] if isinstance(sampling, list) and sampling else sampling
    answers = first.get("n") if isinstance(first, dict) else None
    if answers is None:
        return
    check_type("n", answers, int)
    check_range("n", answers, (1, max(1, MOST_ANSWERS // max(1, prompts))))


def check_sampling(sampling: Mapping[str, Any], struct: Any) -> None:
    """Check sampling parameters as they came in.

    Args:
        sampling: name -> value.
        struct: SGLang's SamplingParams, a msgspec struct.

    Raises:
        RequestRefused: for the first one whose type is not the one that `struct` has for it; for a `stop_regex` that is
            no regular expression.
    """
    types = _types(struct)
    for name, value in sampling.items():
        if name in types and name not in CONVERTED_BY_SGLANG and value is not None:
            check_type(name, value, types[name])
    patterns = sampling.get("stop_regex") or ()
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        try:
            re.compile(pattern)
        except (re.error, OverflowError, RecursionError) as error:
            raise _invalid("stop_regex", pattern, str(error)) from None


def check_labels(labels: Mapping[str, str] | None, allowed: Iterable[str]) -> None:
    """Refuse labels that the metrics do not have: the loop that counts answers would end."""
    for unknown in set(labels or ()) - set(allowed):
        raise _must_be("custom_labels", "labels of --tokenizer-metrics-allowed-custom-labels", unknown)


def check_tokenized(request: Any, vocab_size: int, hidden_size: int, context_length: int) -> None:
    """Check a request as it goes to the scheduler.

    Args:
        request: a TokenizedGenerateReqInput or TokenizedEmbeddingReqInput.
        vocab_size: rows of the model's embedding.
        hidden_size: width of a row.
        context_length: most tokens of a request, prompt and answer.

    Raises:
        RequestRefused: names the field, what it must be and its value.
    """
    struct: Any = type(request)
    for name, kind in _types(struct).items():
        value = getattr(request, name)
        if value is not None and not isinstance(value, (msgspec.Struct, array)) and name != "time_stats":
            check_type(name, value, kind)
    _check_prompt(request, vocab_size, hidden_size)
    _check_sampling(request.sampling_params, vocab_size)
    if hasattr(request, "top_logprobs_num"):
        _check_logprobs(request, vocab_size, context_length)


def _check_prompt(request: Any, vocab_size: int, hidden_size: int) -> None:
    tokens = len(request.input_ids) if request.input_ids is not None else 0
    embeds = getattr(request, "input_embeds", None)
    if embeds is not None:
        if not embeds or any(len(row) != hidden_size for row in embeds):
            got = f"{len(embeds)} rows of {sorted({len(row) for row in embeds})} numbers"
            raise RequestRefused(f"input_embeds must be one row or more of {hidden_size} numbers, got {got}.")
        tokens = len(embeds)
    elif request.mm_inputs is None and getattr(request, "session_params", None) is None and not tokens:
        raise RequestRefused("The prompt must have at least one token, as text or as input_ids.")
    if tokens and embeds is None and request.mm_inputs is None:
        check_tokens("input_ids", request.input_ids, vocab_size)
    for name in ("token_indices_to_pool", "multi_item_delimiter_indices"):
        for position in getattr(request, name, None) or ():
            check_range(name, position, (0, tokens - 1))


def _check_sampling(sampling: Any, vocab_size: int) -> None:
    for name, bounds in SAMPLING_RANGES.items():
        value = getattr(sampling, name)
        if value is not None:
            check_range(name, value, bounds)
    check_tokens("stop_token_ids", sampling.stop_token_ids or (), vocab_size)
    for token, bias in (sampling.logit_bias or {}).items():
        check_range(f"logit_bias of token {token}", bias, LOGIT_BIAS_RANGE)


def _check_logprobs(request: Any, vocab_size: int, context_length: int) -> None:
    check_range("logprob_start_len", request.logprob_start_len, (-1, INT32_MAX))
    check_range("top_logprobs_num", request.top_logprobs_num, (0, vocab_size))
    if not request.return_logprob or request.top_logprobs_num <= USUAL_LOGPROBS:
        return
    tokens, start, new = len(request.input_ids or ()), request.logprob_start_len, request.sampling_params.max_new_tokens
    answer = min(context_length - tokens, context_length if new is None else new)
    positions = ((tokens - start if start >= 0 else 0) + answer) * request.sampling_params.n
    if request.top_logprobs_num * positions > MOST_LOGPROBS:
        raise RequestRefused(
            f"top_logprobs_num must be at most {max(USUAL_LOGPROBS, MOST_LOGPROBS // positions)} at {positions} "
            f"positions, got {request.top_logprobs_num}: reduce it, max_new_tokens or n, or raise logprob_start_len."
        )


def check_type(name: str, value: Any, kind: Any) -> None:
    """Refuse a value that the scheduler could not decode as a `kind`."""
    try:
        msgspec.convert(value, kind)
    except (msgspec.ValidationError, TypeError) as error:
        raise _invalid(name, value, str(error).rstrip(".").replace("Expected", "expected", 1)) from None
    if isinstance(value, int) and not INT64[0] <= value <= INT64[1]:
        raise _must_be(name, "an integer of 64 bits", value)


def check_range(name: str, value: float, bounds: tuple[float, float]) -> None:
    """Refuse a number outside `bounds`, or one that is not a number."""
    low, high = bounds
    if not low <= value <= high:
        allowed = f"between {low:g} and {high:g}" if isinstance(high, float) else f"between {low} and {high}"
        raise _must_be(name, allowed, value)


def check_tokens(name: str, tokens: Iterable[int], vocab_size: int) -> None:
    """Refuse token ids that the model has no row for."""
    ids = np.array(tokens if isinstance(tokens, array) else list(tokens), np.int64)
    outside = ids[(ids < 0) | (ids >= vocab_size)]
    if outside.size:
        raise _must_be(f"each token in {name}", f"between 0 and {vocab_size - 1}", int(outside[0]))


def _must_be(name: str, allowed: str, value: Any) -> RequestRefused:
    return RequestRefused(f"{name} must be {allowed}, got {_shown(value)}.")


def _invalid(name: str, value: Any, reason: str) -> RequestRefused:
    return RequestRefused(f"{name} {_shown(value)} is invalid: {reason}.")


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."


@functools.lru_cache
def _types(struct: Any) -> dict[str, Any]:
    return {field.name: field.type for field in msgspec.structs.fields(struct)}
