"""A logit processor that makes a server decode given tokens first, and can keep what it would have said instead.

A question that is decoded like this is read with sparse attention, as a user's tokens never are: prompts are prefilled
densely. It shows what selection does without that help. The same processor forces the tokens of a dense answer on
another server, to compare the distributions step by step.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor
from torch import Tensor


class ForcedTokens(CustomLogitProcessor):
    """Custom parameters of a request:

    forced: token ids of its first steps.
    keep: file for the log-probabilities [steps, V] float16 of the first `steps` steps, before anything is forced.
    steps: how many steps to keep.
    """

    def __call__(self, logits: Tensor, custom_param_list: list[dict[str, Any]] | None = None) -> Tensor:
        for row, parameters in zip(logits, custom_param_list or (), strict=True):
            request = parameters["__req__"]
            if request.extend_end < len(request.origin_input_ids):
                continue  # a chunk of the prompt, whose sample SGLang throws away
            step = parameters["step"] = parameters.get("step", -1) + 1
            if step < parameters.get("steps", 0):
                kept = parameters.setdefault("kept", [])
                kept.append(torch.log_softmax(row.float(), -1).half().numpy())
                if len(kept) == parameters["steps"]:
                    write_whole(Path(parameters["keep"]), np.stack(kept))
            forced = parameters.get("forced", ())
            if step < len(forced):
                row.fill_(float("-inf"))
                row[forced[step]] = 0.0
        return logits


def write_whole(file: Path, array: np.ndarray) -> None:
    """Write a file that is never seen half written."""
    part = file.with_suffix(".part")
    with part.open("wb") as output:
        np.save(output, array)
    part.rename(file)


def forcing(**parameters: Any) -> dict[str, Any]:
    """Fields of a request that is served with `ForcedTokens`; the server needs `--enable-custom-logit-processor`."""
    return {"custom_logit_processor": ForcedTokens.to_str(), "sampling": {"custom_params": parameters}}
