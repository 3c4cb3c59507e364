"""Refuses at the door what would end a scheduler: every request passes here, from each endpoint and from an Engine.

Read from sglang 0.5.23, in the order in which a request passes them: `_convert_to_internal_request` of
`entrypoints/openai/serving_chat.OpenAIServingChat` and `serving_completions.OpenAIServingCompletion`,
`managers/io_struct.GenerateReqInput.normalize_batch_and_arguments` (and EmbeddingReqInput's), then of
`managers/tokenizer_manager.TokenizerManager`: `_init_req_state` (splits a batch), `_validate_one_request`,
`_create_tokenized_object` (its result goes to the scheduler). All of these only read the request, so an error of theirs
is the request's; SGLang answers 400 to a ValueError and 500 to any other. AROUND, because errors are turned into a
RequestRefused. Besides, `entrypoints/openai/serving_tokenize.OpenAIServingDetokenize`. Remove what upstream
validates.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from sglang_oasis.errors import RequestRefused
from sglang_oasis.seams.request_rules import (
    UINT32_MAX,
    check_answers,
    check_labels,
    check_range,
    check_sampling,
    check_tokenized,
)
from sglang_oasis.seams.seam import Seam

MISREAD = (TypeError, LookupError, AttributeError, ArithmeticError, RecursionError, AssertionError, re.error)
"""What Python raises where a value is not what the code expects."""


def _normalize(original: Callable[..., None], request: Any) -> None:
    check_answers(_prompts(request), request.sampling_params)
    _read(original, request)


def _read(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Let SGLang read the request; what it cannot make sense of is the request's fault."""
    try:
        return original(*args, **kwargs)
    except MISREAD as error:
        raise RequestRefused(
            f"The request cannot be read ({type(error).__name__}: {error}): "
            "check the type of each field, and that lists have one entry per prompt."
        ) from error


def _tokenize(original: Callable[..., Any], manager: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
    from sglang.srt.managers.io_struct import msgpack_encode
    from sglang.srt.runtime_context import get_observability
    from sglang.srt.sampling.sampling_params import SamplingParams

    _read(check_sampling, request.sampling_params, SamplingParams)
    if manager.enable_metrics:
        allowed = get_observability().tokenizer_metrics_allowed_custom_labels
        check_labels(getattr(request, "custom_labels", None), allowed or ())
    tokenized = _read(original, manager, request, *args, **kwargs)
    model = manager.model_config
    _read(check_tokenized, tokenized, model.vocab_size, model.hidden_size, manager.context_len)
    _read(msgpack_encode, tokenized.sampling_params)  # integers of any size may hide in custom_params
    return tokenized


async def _detokenize(original: Callable[..., Any], serving: Any, adapted: Any, request: Any, raw: Any) -> Any:
    tokens = request.tokens
    for token in [token for part in tokens for token in (part if isinstance(part, list) else [part])]:
        check_range("tokens", token, (0, UINT32_MAX))
    return await original(serving, adapted, request, raw)


def _prompts(request: Any) -> int:
    """Prompts in a request that has not been normalized; 1 where it has none, which SGLang refuses."""
    if isinstance(request.text, list):
        return len(request.text)
    ids = request.input_ids
    return len(ids) if isinstance(ids, list) and ids and isinstance(ids[0], list) else 1


_OPENAI = "entrypoints.openai"
_MANAGER = "managers.tokenizer_manager.TokenizerManager"
SEAMS = [
    Seam(f"{_OPENAI}.serving_chat.OpenAIServingChat._convert_to_internal_request", _read, "AROUND"),
    Seam(f"{_OPENAI}.serving_completions.OpenAIServingCompletion._convert_to_internal_request", _read, "AROUND"),
    Seam("managers.io_struct.GenerateReqInput.normalize_batch_and_arguments", _normalize, "AROUND"),
    Seam("managers.io_struct.EmbeddingReqInput.normalize_batch_and_arguments", _read, "AROUND"),
    Seam(f"{_MANAGER}._init_req_state", _read, "AROUND"),
    Seam(f"{_MANAGER}._validate_one_request", _read, "AROUND"),
    Seam(f"{_MANAGER}._create_tokenized_object", _tokenize, "AROUND"),
    Seam(f"{_OPENAI}.serving_tokenize.OpenAIServingDetokenize._handle_non_streaming_request", _detokenize, "AROUND"),
]
