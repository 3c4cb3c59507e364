"""A custom logit processor that fails ends its requests, not the server.

Read from sglang 0.5.23: `managers/tokenizer_manager.TokenizerManager._validate_one_request` (where a ValueError is
answered with 400; BEFORE, as its own result is not needed), `layers/sampler.apply_custom_logit_processor` (called in
the scheduler, which an error would end). Remove what upstream catches.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

from sglang_oasis.errors import RequestRefused
from sglang_oasis.seams.running_batch import looks_back
from sglang_oasis.seams.seam import Seam

_log = logging.getLogger(__name__)


def check_custom_logit_processor(serialized: str) -> None:
    """Refuse what the scheduler could not make a processor of.

    Raises:
        RequestRefused: it cannot be loaded or called.
    """
    from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor

    try:
        processor = CustomLogitProcessor.from_str(serialized)
    except Exception as error:  # whatever its code raises
        raise RequestRefused(
            f"custom_logit_processor cannot be loaded ({type(error).__name__}: {error}): give what "
            "CustomLogitProcessor.to_str() returns, of a class that the server can import."
        ) from error
    if not callable(processor):
        raise RequestRefused("custom_logit_processor cannot be called: give a subclass of CustomLogitProcessor.")


def _validate(manager: Any, request: Any, *args: Any, **kwargs: Any) -> None:
    from sglang.srt.runtime_context import get_exec

    serialized = getattr(request, "custom_logit_processor", None)
    if serialized and get_exec().features.enable_custom_logit_processor:
        check_custom_logit_processor(serialized)


def _apply(original: Callable[..., None], logits: Any, info: Any, num_tokens_in_batch: int = 1) -> None:
    """One processor after the other; each gets a copy of its rows, so one that fails leaves the logits alone."""
    for key, entry in info.custom_logit_processor.items():
        try:
            original(logits, dataclasses.replace(info, custom_logit_processor={key: entry}), num_tokens_in_batch)
        except Exception as error:  # whatever its code raises
            _log.warning("custom logit processor %s failed: %r", type(entry.processor).__name__, error)
            _end(entry, error)


def _end(entry: Any, error: Exception) -> None:
    from sglang.srt.managers.schedule_batch import FINISH_ABORT

    running = looks_back()
    assert running is not None, "a batch with a processor looks back"
    message = (
        f"The custom logit processor {type(entry.processor).__name__} failed ({type(error).__name__}: {error}): "
        "check its custom_params."
    )
    for row in entry.rows:
        running.requests[row].to_finish = FINISH_ABORT(message, HTTPStatus.BAD_REQUEST, "BadRequestError")


SEAMS = [
    Seam("managers.tokenizer_manager.TokenizerManager._validate_one_request", _validate, "BEFORE"),
    Seam("layers.sampler.apply_custom_logit_processor", _apply, "AROUND"),
]
