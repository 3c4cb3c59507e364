"""The GPUs that the planner knows: sizes and rates from data sheets, and measured link rates."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass, fields
from pathlib import Path

from sglang_oasis.errors import LookaheadKVError

MIB = 1 << 20


@dataclass(frozen=True)
class Gpu:
    """One GPU and its link to the host; bytes and seconds, decimal.

    Attributes:
        name: name in the output.
        memory_bytes: all of its memory, as nvidia-smi shows it.
        memory_bytes_per_second: data-sheet bandwidth of its memory.
        flops_per_second: data-sheet peak of dense bfloat16 matrix products.
        link_bytes_per_second: nominal rate of the host link in one direction.
        gather_bytes_per_second: rate of a kernel that reads pinned host memory, as lookahead KV's fetches do.
        source: where the numbers come from.
    """

    name: str
    memory_bytes: int
    memory_bytes_per_second: float
    flops_per_second: float
    link_bytes_per_second: float
    gather_bytes_per_second: float
    source: str = ""


PLAUSIBLE = {
    "memory_bytes": (1e9, 1e13),
    "memory_bytes_per_second": (1e10, 1e14),
    "flops_per_second": (1e11, 1e17),
    "link_bytes_per_second": (1e8, 1e13),
    "gather_bytes_per_second": (1e8, 1e13),
}
"""Least and most of every number in a GPU file; numbers outside were most likely given in other units."""

GPUS = {
    "h100": Gpu(
        "H100 SXM 80GB",
        memory_bytes=81_559 * MIB,
        memory_bytes_per_second=3.35e12,
        flops_per_second=989e12,
        link_bytes_per_second=64e9,
        gather_bytes_per_second=35.2e9,
        source="NVIDIA H100 data sheet (PCIe Gen5 x16); gather: nvbandwidth host_to_device_memcpy_sm, 35.0 to 35.4 on "
        "eight GPUs, github.com/NVIDIA/nvbandwidth/issues/24",
    ),
    "h200": Gpu(
        "H200 SXM 141GB",
        memory_bytes=143_771 * MIB,
        memory_bytes_per_second=4.8e12,
        flops_per_second=989e12,
        link_bytes_per_second=64e9,
        gather_bytes_per_second=35.2e9,
        source="NVIDIA H200 data sheet (PCIe Gen5 x16); gather taken over from the H100, the same chip and link",
    ),
    "a100": Gpu(
        "A100 SXM 80GB",
        memory_bytes=81_920 * MIB,
        memory_bytes_per_second=2.039e12,
        flops_per_second=312e12,
        link_bytes_per_second=32e9,
        gather_bytes_per_second=25.1e9,
        source="NVIDIA A100 data sheet (PCIe Gen4 x16); gather: nvbandwidth host_to_device_memcpy_sm, "
        "github.com/NVIDIA/nvbandwidth/issues/42",
    ),
    "l40s": Gpu(
        "L40S 48GB",
        memory_bytes=46_068 * MIB,
        memory_bytes_per_second=0.864e12,
        flops_per_second=362e12,
        link_bytes_per_second=32e9,
        gather_bytes_per_second=25.1e9,
        source="NVIDIA L40S data sheet (PCIe Gen4 x16); gather taken over from the A100, the same link",
    ),
}


def gpu_of(name: str) -> Gpu:
    """Return a GPU by its name in `GPUS`, or from a JSON file with the fields of `Gpu`.

    Raises:
        LookaheadKVError: there is no such GPU or file, or a field of the file is missing or invalid.
    """
    if name.lower() in GPUS:
        return GPUS[name.lower()]
    if not Path(name).is_file():
        raise LookaheadKVError(
            f"--gpu {shlex.quote(name)} is not known: use one of {', '.join(GPUS)}, or the path of a JSON file."
        )
    try:
        record = json.loads(Path(name).read_text())
    except (OSError, ValueError):
        raise LookaheadKVError(f"--gpu {name} is not a JSON file: give one with the fields of a GPU.") from None
    return _gpu_from(record, name)


def _gpu_from(record: object, file: str) -> Gpu:
    wanted = {field.name for field in fields(Gpu)}
    if not isinstance(record, dict):
        raise LookaheadKVError(
            f"--gpu {file} is not a JSON object: give one with {', '.join(sorted(wanted - {'source'}))}."
        )
    wrong = ", ".join(sorted((set(record) | {"source"}) ^ wanted))
    if wrong:
        raise LookaheadKVError(
            f"--gpu {file} lacks or misspells {wrong}: give {', '.join(sorted(wanted - {'source'}))}."
        )
    for name in ("name", "source"):
        if not isinstance(record.get(name, ""), str):
            raise LookaheadKVError(f"--gpu {file}: {name} must be a string, got {record[name]}.")
    for name, (least, most) in PLAUSIBLE.items():
        value = record[name]
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not least <= value <= most:
            raise LookaheadKVError(
                f"--gpu {file}: {name} must be a number from {least:g} to {most:g}, in bytes (not GB) and seconds, "
                f"got {value!s:.40}."
            )
    if record["gather_bytes_per_second"] > record["link_bytes_per_second"]:
        raise LookaheadKVError(
            f"--gpu {file}: gather_bytes_per_second must be at most link_bytes_per_second, "
            f"{record['link_bytes_per_second']:g}, got {record['gather_bytes_per_second']:g}."
        )
    return Gpu(**{**record, "memory_bytes": int(record["memory_bytes"])})
