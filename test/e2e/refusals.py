"""Command lines as the launcher resolves them, and what a refusal looks like."""

from __future__ import annotations

import json
import os
from typing import Any

from sglang_oasis.testing.processes import run
from test.e2e import argument_resolution

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}
LAUNCH_TIMEOUT = 180.0


def resolved(*command_lines: list[str], **variables: str) -> list[dict[str, Any]]:
    """What becomes of each command line, without a launch, with these environment variables besides."""
    argv = ["-m", argument_resolution.__name__, json.dumps(command_lines)]
    exit_code, output = run(argv, environment={**ENVIRONMENT, **variables}, timeout=LAUNCH_TIMEOUT)
    assert exit_code == 0, output
    (line,) = [line for line in output.splitlines() if line.startswith(argument_resolution.MARK)]
    return json.loads(line.removeprefix(argument_resolution.MARK))


def assert_refused(outcome: dict[str, Any], sentence: str) -> None:
    assert outcome.get("error") == "LookaheadKVError", outcome
    assert sentence in outcome["message"]
    assert outcome["message"].endswith(".")
    assert "\n" not in outcome["message"]
