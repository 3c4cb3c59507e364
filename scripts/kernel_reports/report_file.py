"""Checks the file of a report before the work begins."""

from __future__ import annotations

import argparse
from pathlib import Path


def report_file(text: str) -> Path:
    """Return the path of a writable file, which is created if it does not exist (a type for argparse).

    Raises:
        argparse.ArgumentTypeError: the file cannot be written.
    """
    try:
        with open(text, "a"):
            return Path(text)
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{text} cannot be written ({error.strerror}): name another file.") from None
