"""What is typical for the keys of a model, measured once: summaries are relative to it.

A calibration is a safetensors file. A server finds it in the cache by the hash of the model's folder;
`python -m sglang_oasis.calibrate` writes it.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from sglang_oasis.cache import places
from sglang_oasis.errors import LookaheadKVError
from sglang_oasis.ops.summary import KeyStatistics

VERSION = "1"
PART = "calibration"
"""The cache's folder for these files."""
HASHED_BYTES = 1 << 20
"""The beginning of each weight file counts, and its size: a whole model would take minutes to read."""
WEIGHTS = ("*.safetensors", "*.bin", "*.gguf", "*.pt", "*.pth")


def model_hash(folder: Path) -> str:
    """Return what identifies a model's folder: 16 hexadecimal digits of its configuration and its weight files.

    Raises:
        LookaheadKVError: the folder has no config.json or no weights.
    """
    weights = sorted(file for pattern in WEIGHTS for file in folder.glob(pattern))
    if not (folder / "config.json").is_file() or not weights:
        raise LookaheadKVError(f"The model must be a folder with a config.json and weights, got {folder}.")
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for file in weights:
        digest.update(f"{file.name} {file.stat().st_size} ".encode())
        with file.open("rb") as opened:
            digest.update(opened.read(HASHED_BYTES))
    return digest.hexdigest()[:16]


@dataclass(frozen=True, eq=False)
class Calibration:
    """The statistics of a model's keys.

    Attributes:
        model: hash of the model's folder.
        block_size: tokens of the blocks that were measured.
        layers: per layer, statistics of all its KV heads.
        looseness: [L] float32, factor of the selector's tightness in each layer.
        captured, uncalibrated: attention mass that the selector captures with and without the calibration, measured
            on text that the statistics were not fitted to, see `calibrate`; and the selected tokens that it has for it.
        context, budget: tokens of that text, and selected tokens per KV head.
    """

    model: str
    block_size: int
    layers: list[KeyStatistics]
    looseness: Tensor
    captured: float
    uncalibrated: float
    context: int
    budget: int

    def scalings(self, rank: int, ranks: int) -> list[Tensor]:
        """Return what the ops of a tensor-parallel rank take: per layer [H, 5, D] for its H heads."""
        each = self.layers[0].zero.shape[0] // ranks
        heads = slice(rank * each, (rank + 1) * each)
        return [
            KeyStatistics(*(vector[heads] for vector in layer)).packed(float(looseness))
            for layer, looseness in zip(self.layers, self.looseness, strict=True)
        ]

    def save(self, file: Path) -> None:
        """Write the file; nobody ever sees a part of it."""
        stacked = {name: torch.stack([getattr(layer, name) for layer in self.layers]) for name in KeyStatistics._fields}
        numbers = {name: str(getattr(self, name)) for name in _NUMBERS}
        part = file.with_suffix(f".{os.getpid()}")
        safetensors.torch.save_file(
            {**stacked, "looseness": self.looseness}, part, {"version": VERSION, "model": self.model, **numbers}
        )
        part.rename(file)

    @classmethod
    def load(cls, file: Path) -> Calibration:
        """Read a file.

        Raises:
            LookaheadKVError: it is no calibration, or of another version.
        """
        try:
            with safe_open(file, "pt") as opened:
                said, vectors = opened.metadata() or {}, {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
            if said.get("version") != VERSION:
                raise ValueError(f"version {said.get('version')}")
            statistics = list(map(KeyStatistics, *(vectors[name] for name in KeyStatistics._fields)))
            finite = all(vector.isfinite().all() for vector in vectors.values())
            if not finite or len(vectors["looseness"]) != len(statistics):
                raise ValueError("its numbers are damaged")
            numbers = {name: kind(said[name]) for name, kind in _NUMBERS.items()}
            return cls(said["model"], layers=statistics, looseness=vectors["looseness"], **numbers)
        except (OSError, SafetensorError, ValueError, KeyError) as error:
            raise LookaheadKVError(
                f"{file} must be a calibration that python -m sglang_oasis.calibrate wrote with this version, got "
                f"{type(error).__name__}: {error}; delete it or write it again."
            ) from error

    def check(self, model: str, block_size: int, num_layers: int, kv_heads: int, head_dim: int, ranks: int) -> None:
        """Refuse the calibration of another model.

        Args:
            model: hash of the model's folder.
            block_size, num_layers, kv_heads, head_dim: what the server has, `kv_heads` of all ranks.
            ranks: that share the heads; SGLang makes up heads where they do not divide, and those have no statistics.

        Raises:
            LookaheadKVError: what differs.
        """
        if kv_heads % ranks:
            raise LookaheadKVError(f"A calibration needs as many ranks as divide {kv_heads} KV heads, got {ranks}.")
        shape = len(self.layers), *self.layers[0].zero.shape
        wanted = {
            "model": model,
            "page size": block_size,
            "layers, KV heads and head size": (num_layers, kv_heads, head_dim),
        }
        got = {"model": self.model, "page size": self.block_size, "layers, KV heads and head size": shape}
        for what, value in wanted.items():
            if got[what] != value:
                raise LookaheadKVError(
                    f"The calibration must be of {what} {value}, got {got[what]}: run python -m sglang_oasis.calibrate "
                    f"for this model and page size."
                )


_NUMBERS: dict[str, type] = {"block_size": int, "captured": float, "uncalibrated": float, "context": int, "budget": int}


def file_name(model: str, block_size: int) -> str:
    return f"{model}-page{block_size}.safetensors"


def find(model: str, block_size: int) -> Path | None:
    """Return the model's calibration in the cache, None without one."""
    return next((file for place in places(PART) if (file := place / file_name(model, block_size)).is_file()), None)
