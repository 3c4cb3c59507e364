"""The selector of docs/extending.md, installed as a package of its own, serves; on a device it is refused."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from sglang_oasis.reference_model import truncated_model_path
from sglang_oasis.testing.server import launch_server
from test.e2e.refusals import assert_refused, resolved
from test.e2e.small_pool import BUDGET, ENVIRONMENT, FLAGS, LAYERS, finish_type, text

pytestmark = pytest.mark.e2e

DOCUMENT = Path(__file__).parents[2] / "docs" / "extending.md"
SELECTOR = ("--lookahead-kv-selector", "midpoint")


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """PYTHONPATH with the package that the document shows."""
    source, target = tmp_path_factory.mktemp("package"), tmp_path_factory.mktemp("site-packages")
    (code, *_), (project, *_) = (
        re.findall(rf"```{language}\n(.*?)```", DOCUMENT.read_text(), re.DOTALL) for language in ("python", "toml")
    )
    (source / "my_selector.py").write_text(code)
    (source / "pyproject.toml").write_text(project)
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*pip, "--target", str(target), str(source)], check=True)
    return os.pathsep.join([str(target), os.environ.get("PYTHONPATH", "")])


def test_a_server_finds_it_and_serves(installed: str) -> None:
    drop = ("--lookahead-kv-miss-policy", "drop", "--lookahead-kv-fetch-ratio", "0.2", "--lookahead-kv-smoothing", "0")
    environment = {**ENVIRONMENT, "PYTHONPATH": installed}
    with launch_server(*FLAGS, *drop, *SELECTOR, env=environment, model=truncated_model_path(LAYERS)) as server:
        answer = server.generate(text(1000, 2 * BUDGET), max_new_tokens=24)
        assert finish_type(answer) == "length"
        stats = server.stats()
        assert stats["config"]["selector"] == "midpoint"
        assert stats["counters"]["blocks_fetched"] > 0


def test_without_the_package_it_is_refused_and_on_a_device_with_the_reason(installed: str) -> None:
    command = ["--model-path", str(truncated_model_path(LAYERS)), "--enable-lookahead-kv", *SELECTOR]
    (absent,) = resolved(command)
    assert_refused(absent, "--lookahead-kv-selector must be one of midrange, minmax, got midpoint.")
    (refused,) = resolved(command, PYTHONPATH=installed, SGLANG_OASIS_DEVICE_PATH="1")
    reason = "use minmax or midrange, because its kernels compute bounds only."
    assert_refused(refused, f"--lookahead-kv-selector midpoint on a CUDA device yet: {reason}")
