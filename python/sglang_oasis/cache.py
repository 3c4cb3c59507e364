"""The cache folder in which the project keeps what it creates: models, built kernels, logs."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import shutil
import stat
import tempfile
from pathlib import Path

logger = logging.getLogger(__name__)


class CacheError(OSError):
    """No cache folder can be written; the message is one sentence for the user."""


def cache_folder() -> Path:
    """The project's cache folder: `$OASIS_CACHE`, by default `$XDG_CACHE_HOME/sglang-oasis`; it need not exist."""
    if configured := os.environ.get("OASIS_CACHE"):
        return _expanded(configured)
    return _expanded(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "sglang-oasis"


def places(part: str) -> list[Path]:
    """Folders in which to look for a part of the cache, the preferred one first; does not create them."""
    temporary = _temporary_folder()
    return [cache_folder() / part, *([temporary / part] if temporary is not None and _is_ours(temporary) else [])]


def writable_folder(part: str, needs: int) -> Path:
    """Create and return the folder for a part of the cache, or a temporary folder instead, with a warning.

    Args:
        part: such as "models".
        needs: bytes that must be free.

    Raises:
        CacheError: neither folder can be written, or both have too little space.
    """
    place, temporary = cache_folder() / part, _temporary_folder()
    if (obstacle := _obstacle(place, needs)) is None:
        return place
    if temporary is not None:
        with contextlib.suppress(OSError):
            temporary.mkdir(mode=0o700, exist_ok=True)
        if _is_ours(temporary) and _obstacle(temporary / part, needs) is None:
            _warn_once(f"{obstacle}: using {temporary / part} instead, which may be lost at a restart.")
            return temporary / part
    raise CacheError(f"{obstacle}: set OASIS_CACHE to a folder with {needs / 1e6:.0f} MB free")


def _expanded(path: str) -> Path:
    """The path made absolute; "~" is the root folder where the user has no home folder, as in many containers."""
    try:
        return Path(path).expanduser().absolute()
    except RuntimeError:
        return Path("/", path.removeprefix("~/"))


def _temporary_folder() -> Path | None:
    """The folder to use where the cache folder cannot be written; None where no temporary folder exists."""
    try:
        return Path(tempfile.gettempdir()) / f"sglang-oasis-{os.getuid()}"
    except OSError:
        return None


def _is_ours(folder: Path) -> bool:
    """Whether only this user can write to the folder, which matters because libraries are loaded from it."""
    try:
        found = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o022


def _obstacle(folder: Path, needs: int) -> str | None:
    """Why files of `needs` bytes cannot be written to the folder; None if they can."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            free = shutil.disk_usage(folder).free
    except OSError as error:
        return f"{folder} cannot be written ({error.strerror})"
    return f"{folder} needs {needs / 1e6:.0f} MB free and has {free / 1e6:.0f} MB" if free < needs else None


@functools.cache
def _warn_once(message: str) -> None:
    logger.warning(message)
