"""The file that a report is written to, refused before the work is done."""

from __future__ import annotations

import argparse
from pathlib import Path


def report_file(text: str) -> Path:
    """A type for argparse: a file that can be written, made if it is not there.

    Raises:
        argparse.ArgumentTypeError: it cannot.
    """
    try:
        with open(text, "a"):
            return Path(text)
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{text} cannot be written ({error.strerror}): name another file.") from None
