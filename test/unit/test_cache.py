"""Where things are kept: in the cache, and elsewhere when it cannot be written."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import NamedTuple

import pytest

from sglang_oasis import cache

MEGABYTE = 1_000_000


class Usage(NamedTuple):
    free: int


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that stands in for the cache."""
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    cache._warn_once.cache_clear()
    return tmp_path / "tmp" / f"sglang-oasis-{os.getuid()}"


@pytest.fixture
def unwritable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder in which nothing can be made, not even by root."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("OASIS_CACHE", str(tmp_path / "file" / "cache"))
    return tmp_path / "file" / "cache"


def test_things_are_kept_in_the_cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OASIS_CACHE", str(tmp_path / "a b" / "cache"))
    assert cache.writable_folder("models", MEGABYTE) == tmp_path / "a b" / "cache" / "models"
    assert (tmp_path / "a b" / "cache" / "models").is_dir()


def test_a_cache_that_cannot_be_written_is_replaced_and_one_warning_says_so(
    unwritable: Path, temporary: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert cache.writable_folder("models", MEGABYTE) == temporary / "models"
    assert cache.writable_folder("models", MEGABYTE) == temporary / "models"
    assert temporary.stat().st_mode & 0o777 == 0o700
    assert [record.getMessage() for record in caplog.records] == [
        f"{unwritable / 'models'} cannot be written (Not a directory): using {temporary / 'models'} instead, which may "
        "be lost at a restart."
    ]
    assert cache.places("models") == [unwritable / "models", temporary / "models"]


def test_a_full_cache_is_replaced(tmp_path: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OASIS_CACHE", str(tmp_path / "cache"))
    full, free = tmp_path / "cache", 10 * MEGABYTE
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: Usage(0 if full in Path(folder).parents else free))
    assert cache.writable_folder("models", MEGABYTE) == temporary / "models"


def test_when_nothing_can_be_written_one_sentence_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OASIS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: Usage(MEGABYTE))
    with pytest.raises(cache.CacheError) as error:
        cache.writable_folder("models", 5 * MEGABYTE)
    assert str(error.value) == (
        f"{tmp_path / 'cache' / 'models'} needs 5 MB free and has 1 MB: set OASIS_CACHE to a folder with 5 MB free"
    )
    assert not caplog.records


def test_looking_makes_no_folder(tmp_path: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OASIS_CACHE", str(tmp_path / "cache"))
    assert cache.places("kernels") == [tmp_path / "cache" / "kernels"]
    assert not (tmp_path / "cache").exists()
    assert not temporary.exists()


@pytest.mark.parametrize("kind", ["open to all", "a link", "another user's"])
def test_a_temporary_folder_that_others_can_fill_is_not_used(
    unwritable: Path, temporary: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    if kind == "a link":
        (tmp_path / "elsewhere").mkdir(mode=0o700)
        temporary.symlink_to(tmp_path / "elsewhere")
    else:
        temporary.mkdir(mode=0o700)
        temporary.chmod(0o777 if kind == "open to all" else 0o700)
    if kind == "another user's":
        if os.getuid() != 0:
            pytest.skip("only root can give a folder away")
        os.chown(temporary, 12345, -1)
    assert cache.places("kernels") == [unwritable / "kernels"]
    with pytest.raises(cache.CacheError, match="set OASIS_CACHE"):
        cache.writable_folder("kernels", MEGABYTE)


def test_a_user_without_home_nor_account_has_a_place(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home(path: Path) -> Path:
        raise RuntimeError("Could not determine home directory.")

    for name in ("OASIS_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "expanduser", no_home)
    assert cache.cache_folder() == Path("/.cache/sglang-oasis")
