"""Fixes sampling: seeds work, a distribution without any token ends no scheduler, penalties need no compiler.

Read from sglang 0.5.23: `layers/sampler.Sampler._sample_from_probs`,
`sampling/penaltylib/repetition_penalty.apply_scaling_penalties`. `seams/running_batch.py` prepares the batch's history,
`seams/speculation.py` calls `serving/sampling/verification.py` to verify drafts. Remove the first hook when upstream's
seeds need no deterministic mode, the second when upstream does not compile that function on a CPU.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from sglang_oasis.seams.seam import Seam
from sglang_oasis.serving.cpu_platform.detect import cpu_platform_wanted
from sglang_oasis.serving.sampling.penalties import scale
from sglang_oasis.serving.sampling.seeds import draw


def _sample_from_probs(
    original: Callable[..., Any], sampler: Any, probs: Any, info: Any, positions: Any, simple_sampling_case: bool
) -> Any:
    # If every token is forbidden, as after a draft that a grammar forbids, torch.multinomial would raise.
    probs = probs.nan_to_num(nan=1.0)
    if info.sampling_seed is None:
        return original(sampler, probs, info, positions, simple_sampling_case)
    tokens, capture = draw(probs, info, positions), None
    if info.sampling_mask_batch_indices is not None:
        _, capture = original(
            sampler, probs, dataclasses.replace(info, sampling_seed=None), positions, simple_sampling_case
        )
        capture = capture._replace(selected_weight=None)  # SGLang then looks up the weight of the sampled token
    return tokens, capture


SEAMS = [
    Seam("layers.sampler.Sampler._sample_from_probs", _sample_from_probs, "AROUND"),
    *(
        [Seam("sampling.penaltylib.repetition_penalty.apply_scaling_penalties", scale, "REPLACE")]
        if cpu_platform_wanted()
        else []
    ),
]
