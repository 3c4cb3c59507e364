"""The quickstart on a bare machine: neither a home, nor lscpu, nor a C++ compiler."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from sglang_oasis.reference_model import reference_model_path

TIMEOUT_S = 1000
pytestmark = [pytest.mark.e2e, pytest.mark.timeout(TIMEOUT_S + 100)]

QUICKSTART = Path(__file__).resolve().parents[2] / "examples" / "quickstart.py"
DOCUMENT_TOKENS = 600


def test_the_quickstart_says_what_to_expect_answers_and_reports(tmp_path: Path) -> None:
    cache, programs = tmp_path / "my cache", tmp_path / "programs"
    (cache / "models").mkdir(parents=True)
    (cache / "models" / reference_model_path().name).symlink_to(reference_model_path())
    programs.mkdir()
    for name in ("sh", "uname"):  # what Python's own library asks for
        (programs / name).symlink_to(shutil.which(name) or "")
    environment = {name: value for name, value in os.environ.items() if name not in ("HOME", "XDG_CACHE_HOME")}
    environment |= {"PATH": str(programs), "CXX": "/nowhere/g++", "OASIS_CACHE": str(cache)}
    done = subprocess.run(
        [
            *(sys.executable, str(QUICKSTART), "--document-tokens", str(DOCUMENT_TOKENS), "--answer-tokens", "4"),
            *("--lookahead-kv-device-gb", "0.3", "--dtype", "float32"),
        ],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
        timeout=TIMEOUT_S,
    )
    said = done.stdout
    assert done.returncode == 0, said
    expected = rf"tokens/s, long texts more slowly: the first answer to {DOCUMENT_TOKENS} tokens begins in \d+ s"
    assert re.search(rf"It reads about [\d,]+ {expected}", said)
    assert said.count("Answer:   ") == 2
    assert re.search(r"KV cache in host memory\W+[1-9]\d* MB of \d+ tokens", said)
    assert re.search(r"Prefix-cache hits, 2nd question\W+(\d{3}) of \d{3} tokens", said)
    assert re.search(r"Time to first token, 1st question\W+\d+\.\d\d s", said)
    log = (cache / "logs" / "quickstart-server.log").read_text()
    assert "there is no C++ compiler (/nowhere/g++); install g++, or set CXX to one" in log
