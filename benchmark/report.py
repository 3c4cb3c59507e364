"""The output of every benchmark: a table, a progress bar, and a JSON file and a figure under results/."""

from __future__ import annotations

import json
import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import rich
import torch
from matplotlib.figure import Figure
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import track
from rich.table import Table

T = TypeVar("T")
RESULTS = Path(__file__).parent / "results"
STDERR = Console(stderr=True)


def save(name: str, record: Mapping[str, Any], figure: Figure | None = None) -> None:
    """Write results/<name>.json, with the command and the machine first, and results/<name>.png.

    Args:
        name: file name without its suffix.
        record: JSON values; lists of numbers are written on one line.
        figure: not written when None.
    """
    RESULTS.mkdir(exist_ok=True)
    whole = {"command": command_line(), "machine": machine_facts(), **record}
    lines = json.dumps(whole, indent=1, default=str)  # paths among the options
    text = re.sub(r"\[[-+\d.,e\s]+\]", lambda numbers: " ".join(numbers[0].split()), lines)
    (RESULTS / f"{name}.json").write_text(text + "\n")
    if figure is not None:
        figure.savefig(RESULTS / f"{name}.png", dpi=120, bbox_inches="tight")
    rich.print(f"written: {os.path.relpath(RESULTS)}/{name}.json", "" if figure is None else "and .png")


def command_line() -> str:
    """Return the command that started this process, as typed in a shell."""
    return shlex.join(["python", *sys.orig_argv[1:]])


def machine_facts() -> dict[str, str | int | None]:
    """Return processor, cores and threads, GPU or None, versions, and the git commit ("-dirty" with changes)."""
    cpuinfo = Path("/proc/cpuinfo")
    models = [line for line in cpuinfo.read_text().splitlines() if "model name" in line] if cpuinfo.exists() else []
    return {
        "cpu": models[0].split(":", 1)[1].strip() if models else platform.processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "commit": commit_of(RESULTS.parent),
    }


def commit_of(folder: Path) -> str | None:
    """Return the git commit that is checked out in a folder, with "-dirty" if it has changes; None without git."""
    git = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    return subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip() or None


def show_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table whose first column is text and whose others are numbers."""
    table = Table(title=title, box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if index else "left")
    for row in rows:
        table.add_row(*row)
    console = Console()
    console.width = max(console.width, 120)  # a pipe or a log has 80 columns, too few for numbers
    console.print(table)


def progress(items: Sequence[T], description: str) -> Iterable[T]:
    """Yield the items, with a progress bar on standard error; progress bars may be nested."""
    return track(items, description, console=STDERR)
