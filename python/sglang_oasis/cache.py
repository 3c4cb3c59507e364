"""Where the project keeps what it makes: models, built kernels, logs."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """Return the project's cache folder: `$OASIS_CACHE`, by default `$XDG_CACHE_HOME/sglang-oasis`."""
    if configured := os.environ.get("OASIS_CACHE"):
        return Path(configured).expanduser().absolute()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser().absolute() / "sglang-oasis"
