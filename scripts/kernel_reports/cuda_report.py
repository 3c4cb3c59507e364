"""Reports the cost of the CUDA C++ kernels that is known without a GPU: registers, spills and bytes moved.

`python -m scripts.kernel_reports.cuda_report [--json FILE]` compiles them for every architecture and
counts the bytes of the decode step that docs/kernels.md describes.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import tempfile
from typing import NamedTuple

from scripts.kernel_reports.report_file import report_file
from sglang_oasis.kernels import compiled
from sglang_oasis.kernels.cuda import native
from sglang_oasis.ops.summary import SUMMARY_FORMATS, SummaryFormat

ARCHITECTURES = ("sm_80", "sm_90", "sm_100")
SECTOR = 32
"""Bytes of the smallest unit of a global memory access."""
INT, FLOAT = 4, 4


class KernelCost(NamedTuple):
    """The assembler's data about one kernel.

    Attributes:
        kernel: its name.
        architecture: architecture for which it was compiled.
        registers: registers per thread.
        shared_bytes: bytes of static shared memory per thread block.
        stack_bytes: bytes of stack per thread.
        spill_bytes: bytes stored and loaded per thread because there are too few registers.
    """

    kernel: str
    architecture: str
    registers: int
    shared_bytes: int
    stack_bytes: int
    spill_bytes: int


class Traffic(NamedTuple):
    """Bytes of one launch.

    Attributes:
        moved: bytes that the kernel reads and writes, in whole sectors.
        floor: bytes that any kernel must read and write.
    """

    moved: int
    floor: int

    @property
    def ratio(self) -> float:
        return self.moved / self.floor


_ENTRY = re.compile(
    r"Compiling entry function '(?P<kernel>\w+)'.*\n.*Function properties.*\n"
    r"\s*(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores, (?P<loads>\d+) bytes spill loads\n"
    r".*Used (?P<registers>\d+) registers(?:.*, (?P<shared>\d+) bytes smem)?"
)


def kernel_costs(architecture: str) -> list[KernelCost]:
    """Compile every kernel for an architecture such as "sm_90".

    Raises:
        RuntimeError: there is no CUDA toolkit, or a kernel does not compile; the message is the compiler's.
    """
    nvcc = native.cuda_home() / "bin" / "nvcc"
    costs = []
    for source in sorted(compiled.source_folder("csrc/cuda").glob("*.cu")):
        with tempfile.TemporaryDirectory() as folder:
            target = (f"-arch={architecture}", "-cubin", "-o", f"{folder}/{source.stem}.cubin", str(source))
            command = [str(nvcc), "-std=c++17", *native.CUDA_CFLAGS, "-Xptxas=-v", *target]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise RuntimeError(f"{source.name} does not compile for {architecture}: {done.stderr.strip()}")
        for found in _ENTRY.finditer(done.stderr):
            spills = int(found["stores"]) + int(found["loads"])
            shared = int(found["shared"] or 0)
            name = _plain_name(found["kernel"])
            costs.append(KernelCost(name, architecture, int(found["registers"]), shared, int(found["stack"]), spills))
    return costs


def select_traffic(
    *,
    entries: int,
    kv_heads: int,
    query_heads: int,
    head_dim: int,
    element_bytes: int,
    fmt: SummaryFormat,
    candidates: int,
    selected: int,
    admitted: int,
    smoothing: bool,
    rereads: bool = False,
) -> Traffic:
    """Return the bytes that `fused_select` moves in device memory.

    Floor: each summary once, each average read and written, the queries, `slot_of` of the K best, the K ages read and
    those of the resident written, the admissions. The kernel moves whole sectors, and gathers `slot_of` of blocks that
    may be anywhere.

    Args:
        entries: n.
        kv_heads: H.
        query_heads: per KV head and entry, G * Q.
        head_dim: D.
        element_bytes: of the queries.
        fmt: of the summaries.
        candidates: per entry.
        selected: K.
        admitted: C, all admitted.
        smoothing: whether there are averages.
        rereads: whether the logits do not fit into shared memory.
    """
    records = candidates * fmt.record_bytes(head_dim)
    averages = 2 * FLOAT * candidates if smoothing else 0
    queries = query_heads * head_dim * element_bytes
    ages, marks, admissions = INT * selected, INT * (selected - admitted), 2 * INT * admitted
    slots = INT * selected
    floor = records + averages + queries + ages + marks + admissions + slots
    # Records start anywhere in a sector: one more than they fill.
    moved = (2 if rereads else 1) * (_sectors(records) + SECTOR) + (_sectors(averages) + 2 * SECTOR if smoothing else 0)
    moved += _sectors(queries) + _sectors(ages) + SECTOR + _sectors(admissions) + 2 * SECTOR
    moved += SECTOR * selected + min(SECTOR * (selected - admitted), _sectors(ages))
    # Scores are written to scratch and read to smooth and to rank, by the digit and once more.
    moved += (3 * FLOAT + 8 * FLOAT) * candidates if rereads else 0
    return Traffic(entries * kv_heads * moved, entries * kv_heads * floor)


def fetch_traffic(*, admissions: int, admitted: int, chunk_bytes: int) -> Traffic:
    """Return the bytes that `fetch_blocks` moves in host and device memory.

    Floor: each chunk read and written, the admissions, and of each admitted block its page, the evicted block and the
    four entries of the maps. The kernel moves whole sectors.

    Args:
        admissions: n * H * C.
        admitted: those that are not -1.
        chunk_bytes: of K and V of a block and head.
    """
    listed = 2 * INT * admissions
    return Traffic(
        admitted * (2 * chunk_bytes + 6 * SECTOR) + _sectors(listed),
        admitted * (2 * chunk_bytes + 6 * INT) + listed,
    )


def traffic_of_qwen3_8b() -> dict[str, Traffic]:
    """Return the bytes per kernel and summary format, for the decode step that docs/kernels.md describes."""
    from scripts.kernel_reports.workload import QWEN3_8B as load

    admissions = load.batch * load.heads * load.most
    found = {"fetch_blocks": fetch_traffic(admissions=admissions, admitted=admissions, chunk_bytes=load.chunk_bytes)}
    for rereads, suffix in ((False, ""), (True, ", read twice")):
        for fmt in SUMMARY_FORMATS:
            found[f"fused_select, {fmt}{suffix}"] = select_traffic(
                entries=load.batch, kv_heads=load.heads, query_heads=load.group * load.queries, head_dim=load.head_dim,
                element_bytes=load.dtype.itemsize, fmt=SUMMARY_FORMATS[fmt], candidates=load.blocks,
                selected=load.selected, admitted=load.most, smoothing=load.smoothed, rereads=rereads,
            )  # fmt: skip
    return found


def _sectors(num_bytes: int) -> int:
    return -(-num_bytes // SECTOR) * SECTOR


def _plain_name(symbol: str) -> str:
    """Return a short name such as `fused_select_kernel<Int4>` from a mangled name."""
    plain = subprocess.run(["c++filt", symbol], capture_output=True, text=True, check=True).stdout
    return re.sub(r"oasis::|\(anonymous namespace\)::|^void |\(.*\)$", "", plain.strip())


def main() -> None:
    """Print the report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=report_file, help="write the report to this file too")
    path = parser.parse_args().json
    try:
        costs = [cost for architecture in ARCHITECTURES for cost in kernel_costs(architecture)]
    except RuntimeError as error:
        raise SystemExit(f"cuda_report: {error}") from None
    traffic = traffic_of_qwen3_8b()
    print(f"{'kernel':36}{'':9}{'registers':>10}{'shared':>8}{'stack':>7}{'spills':>8}")
    for cost in costs:
        print(
            f"{cost.kernel:36}{cost.architecture:9}{cost.registers:10}{cost.shared_bytes:8}{cost.stack_bytes:7}"
            f"{cost.spill_bytes:8}"
        )
    print(f"\n{'bytes in one layer':36}{'moved':>12}{'floor':>12}{'moved / floor':>15}")
    for name, count in traffic.items():
        print(f"{name:36}{count.moved:12,}{count.floor:12,}{count.ratio:15.3f}")
    if path is not None:
        record = {
            "kernels": [cost._asdict() for cost in costs],
            "traffic": {name: count._asdict() for name, count in traffic.items()},
        }
        path.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
