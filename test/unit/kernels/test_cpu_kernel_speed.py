"""No instruction set's kernels are several times slower than what it can do: beside torch's own attention.

The bounds catch a factor of ten, as where a compiler works on vectors lane by lane, and leave room for a machine or a
version of torch that is three times as good as those they were chosen with.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sglang_oasis.testing.torch_limits import TORCH_LIMITS

REPO = Path(__file__).resolve().parents[3]
LEAST = {"prefill": 0.25, "decode": 0.6, "scores": 1.5, "summaries": 0.6}
"""Times as fast as torch's float32 attention on the same instruction set, see kernel_speed.py."""


@pytest.mark.parametrize("isa", ["baseline", "avx2", "avx512", "avx512bf16"])
def test_every_instruction_set_is_used_well(kernels: Any, isa: str) -> None:
    if isa not in kernels.instruction_sets():
        pytest.skip("this machine does not have it")
    environment = {**os.environ, "SGLANG_OASIS_CPU_ISA": isa, **TORCH_LIMITS.get(isa, {})}
    command = [sys.executable, "-m", "test.cases.kernel_speed"]
    timed = subprocess.run(command, env=environment, cwd=REPO, capture_output=True, text=True, timeout=300)
    assert timed.returncode == 0, timed.stderr
    measured = json.loads(timed.stdout)
    assert measured["instruction_set"] == isa
    slow = {case: ratio for case, ratio in measured["ratios"].items() if ratio < LEAST[case.split(",")[0]]}
    assert not slow, measured["ratios"]
