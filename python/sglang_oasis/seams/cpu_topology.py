"""Lists the CPUs that this process may use, also without `lscpu` and inside a container.

Read from sglang 0.5.23: `utils/common.parse_lscpu_topology` (AROUND: its callers keep the first CPU of each core, drop
those that the process may not run on, and divide by the number of NUMA nodes). It runs `lscpu`, so no server starts on
a CPU without that program; and if a container has only the second threads of some cores, it counts 0 nodes, and the
division fails. Remove this when SGLang asks for the CPUs of its process.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

from sglang_oasis.seams.seam import Seam

SYSFS = Path("/sys/devices/system/cpu")

Cpu = tuple[int, int, int, int]
"""Numbers of CPU, core, socket and NUMA node."""


def allowed_topology(original: Callable[[], list[Cpu]]) -> list[Cpu]:
    """Return the CPUs that this process may run on."""
    allowed = os.sched_getaffinity(0)
    try:
        known = original()
    except RuntimeError:
        known = [_from_sysfs(cpu) for cpu in sorted(allowed)]
    return [cpu for cpu in known if cpu[0] in allowed] or [(cpu, cpu, 0, 0) for cpu in sorted(allowed)]


def _from_sysfs(cpu: int) -> Cpu:
    """Return the kernel's data about a CPU; a CPU without data counts as a core of its own, on node 0."""
    folder = SYSFS / f"cpu{cpu}"

    def read(name: str, default: int) -> int:
        try:
            return max(0, int((folder / "topology" / name).read_text()))
        except (OSError, ValueError):
            return default

    nodes = [int(node[1]) for link in folder.glob("node*") if (node := re.fullmatch(r"node(\d+)", link.name))]
    return cpu, read("core_id", cpu), read("physical_package_id", 0), min(nodes, default=0)


SEAMS = [Seam("utils.common.parse_lscpu_topology", allowed_topology, "AROUND")]
