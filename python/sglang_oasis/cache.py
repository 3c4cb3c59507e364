"""Where the project keeps what it makes: models, built kernels, logs."""

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
    """Nothing can be kept; one sentence for the user."""


def cache_folder() -> Path:
    """The project's cache folder: `$OASIS_CACHE`, by default `$XDG_CACHE_HOME/sglang-oasis`; it need not exist."""
    if configured := os.environ.get("OASIS_CACHE"):
        return _expanded(configured)
    return _expanded(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "sglang-oasis"


def places(part: str) -> list[Path]:
    """Folders that may hold a part of the cache, the first one first; for reading, so none is made."""
    temporary = _temporary_folder()
    return [cache_folder() / part, *([temporary / part] if temporary is not None and _is_ours(temporary) else [])]


def writable_folder(part: str, needs: int) -> Path:
    """Make a folder for a part of the cache: in the cache, or in the temporary folder, with a warning.

    Args:
        part: such as "models".
        needs: bytes that must be free.

    Raises:
        CacheError: neither can be written.
    """
    place, temporary = cache_folder() / part, _temporary_folder()
    if (obstacle := _obstacle(place, needs)) is None:
        return place
    if temporary is not None:
        with contextlib.suppress(OSError):
            temporary.mkdir(mode=0o700, exist_ok=True)
        if _is_ours(temporary) and _obstacle(temporary / part, needs) is None:
            _warn_once(f"{obstacle}: {temporary / part} is used instead, which a restart may empty.")
            return temporary / part
    raise CacheError(f"{obstacle}: set OASIS_CACHE to a folder with {needs / 1e6:.0f} MB free")


def _expanded(path: str) -> Path:
    """An absolute path; one of a user without a home folder, as in many containers, lies in the root folder."""
    try:
        return Path(path).expanduser().absolute()
    except RuntimeError:
        return Path("/", path.removeprefix("~/"))


def _temporary_folder() -> Path | None:
    """What stands in for a cache that cannot be written; None where nothing temporary can be."""
    try:
        return Path(tempfile.gettempdir()) / f"sglang-oasis-{os.getuid()}"
    except OSError:
        return None


def _is_ours(folder: Path) -> bool:
    """Whether nobody else can put files there: libraries are loaded from it."""
    try:
        found = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o022


def _obstacle(folder: Path, needs: int) -> str | None:
    """Why files of that size cannot be written, None if they can."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            free = shutil.disk_usage(folder).free
    except OSError as error:
        return f"{folder} cannot be written ({error.strerror})"
    return f"{folder} has {free / 1e6:.0f} of the {needs / 1e6:.0f} MB free that it takes" if free < needs else None


@functools.cache
def _warn_once(message: str) -> None:
    logger.warning(message)
