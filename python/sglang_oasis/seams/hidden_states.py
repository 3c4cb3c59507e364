"""Returns the model's last hidden states also with EAGLE-3, and not the inner ones that the EAGLE-3 head reads.

Read from sglang 0.5.23: `layers/logits_processor.LogitsProcessor._get_last_hidden_states_to_store` (keeps them beside
the model's inner ones, for another feature), `managers/utils.GenerationBatchResult.copy_to_cpu` (runs after the
head).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_oasis.seams.seam import Seam


def _keep(original: Callable[..., Any], processor: Any, hidden: Any, inner: Any, metadata: Any) -> Any:
    from sglang.srt.runtime_context import get_exec

    wanted = get_exec().features.return_hidden_states_mode is not None
    if wanted and inner is not None and metadata.capture_hidden_mode.is_full():
        return hidden
    return original(processor, hidden, inner, metadata)


def _hand_over(result: Any, return_logprob: bool, return_hidden_states: bool = True) -> None:
    output = result.logits_output
    if return_hidden_states and output is not None and output.last_hidden_states is not None:
        output.hidden_states = output.last_hidden_states


SEAMS = [
    Seam("layers.logits_processor.LogitsProcessor._get_last_hidden_states_to_store", _keep, "AROUND"),
    Seam("managers.utils.GenerationBatchResult.copy_to_cpu", _hand_over, "BEFORE"),
]
