"""Compiles every Triton kernel for GPUs, which need not be present, and reports the resources that each kernel takes.

`python -m scripts.kernel_reports.compile_report [--json FILE]`. Triton caches what it compiles by the sources.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import tempfile
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from scripts.kernel_reports import staging_workload, workload
from scripts.kernel_reports.report_file import report_file
from scripts.kernel_reports.workload import WORKLOADS, Workload
from sglang_oasis.kernels.triton.launches import Launch

ARCHITECTURES = (80, 90, 100)
ALIGNMENT = 16
"""Alignment in bytes, and divisor of integers, for which Triton specialises a kernel."""

_TYPES = {
    torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32",
    torch.uint8: "u8", torch.int32: "i32", torch.int64: "i64",
}  # fmt: skip
_WIDE = r"\.global\S*\.(?:v4\.b32|v2\.b64|v4\.u32|v2\.u64)"


class Compiled(NamedTuple):
    """The resources of a kernel on one architecture.

    Attributes:
        workload, kernel, architecture: names; 90 means sm_90.
        threads: threads per program.
        registers: registers per thread.
        spilled: bytes of a thread's registers that are spilled to memory.
        shared: bytes of shared memory per program.
        wide_loads, wide_stores: instructions in the PTX that move 16 bytes per thread from or to global memory.
    """

    workload: str
    kernel: str
    architecture: int
    threads: int
    registers: int
    spilled: int
    shared: int
    wide_loads: int
    wide_stores: int


def source_of(launch: Launch) -> ASTSource:
    """Return the kernel, specialised as by Triton's launcher: 1 is a constant, multiples of 16 are marked as such."""
    signature: dict[str, str] = {}
    constants: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], list[list[Any]]] = {}
    for index, parameter in enumerate(launch.kernel.params):
        value = launch.arguments[parameter.name]
        aligned = False
        if parameter.is_constexpr or value is None or (isinstance(value, int) and value == 1):
            signature[parameter.name], constants[(index,)] = "constexpr", value
        elif isinstance(value, Tensor):
            signature[parameter.name], aligned = "*" + _TYPES[value.dtype], True
        elif isinstance(value, float):
            signature[parameter.name] = "fp32"
        else:
            signature[parameter.name] = "i32" if -(2**31) <= value < 2**31 else "i64"
            aligned = value % ALIGNMENT == 0
        if aligned:
            attributes[(index,)] = [["tt.divisibility", ALIGNMENT]]
    return ASTSource(launch.kernel, signature, constants, attributes)


def compile_launch(workload: str, launch: Launch, architecture: int) -> Compiled:
    """Compile one kernel for sm_`architecture`."""
    target = GPUTarget("cuda", architecture, 32)
    kernel = triton.compile(source_of(launch), target=target, options={"num_warps": launch.warps})
    registers, spilled = _resources(kernel.asm["cubin"])
    ptx = kernel.asm["ptx"]
    wide = [len(re.findall(instruction + _WIDE, ptx)) for instruction in ("ld", "st")]
    name, threads = launch.kernel.__name__, 32 * launch.warps
    return Compiled(workload, name, architecture, threads, registers, spilled, kernel.metadata.shared, *wide)


def every_launch(load: Workload) -> list[Launch]:
    """Return all launches of a decode step and of prefill staging."""
    return [*workload.launches_of(load), *staging_workload.launches_of(load)]


def compile_all(architectures: Sequence[int] = ARCHITECTURES) -> list[Compiled]:
    """Compile every kernel, for every workload and architecture."""
    return [
        compile_launch(name, launch, architecture)
        for name, load in WORKLOADS.items()
        for launch in every_launch(load)
        for architecture in architectures
    ]


def table(results: Sequence[Compiled]) -> str:
    """Return the results as a Markdown table."""
    lines = ["| " + " | ".join(Compiled._fields) + " |", "|---" * len(Compiled._fields) + "|"]
    return "\n".join([*lines, *("| " + " | ".join(map(str, result)) + " |" for result in results)])


def _resources(cubin: bytes) -> tuple[int, int]:
    """Return registers and stack bytes per thread; the kernels use the stack for spilled registers only."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found = {name: int(re.findall(rf"\b{name}:(\d+)", said)[0]) for name in ("REG", "STACK", "LOCAL")}
    return found["REG"], found["STACK"] + found["LOCAL"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=report_file, help="also write the results to this file")
    parser.add_argument("--arch", type=int, nargs="+", default=ARCHITECTURES, help="compute capabilities, such as 90")
    arguments = parser.parse_args()
    if triton.knobs.runtime.interpret:
        parser.error("TRITON_INTERPRET is set: unset it, nothing is compiled under it")
    results = compile_all(arguments.arch)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps([result._asdict() for result in results], indent=1) + "\n")
    print(table(results))


if __name__ == "__main__":
    main()
