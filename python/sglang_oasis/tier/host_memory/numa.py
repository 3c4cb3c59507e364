"""Finds the memory node nearest to a GPU, and places memory mappings there."""

from __future__ import annotations

import ctypes
import logging
import os
import platform
from pathlib import Path

logger = logging.getLogger(__name__)

SYSFS = Path("/sys")
MPOL_PREFERRED = 1
MPOL_F_ADDR = 2
MOST_NODES = 1024
_SYSCALLS = {"x86_64": (237, 239), "aarch64": (235, 236)}
"""System call numbers of mbind and get_mempolicy; libnuma, which wraps these calls, is not on every machine."""

_libc = ctypes.CDLL(None, use_errno=True)
_NodeMask = ctypes.c_ulong * (MOST_NODES // (8 * ctypes.sizeof(ctypes.c_ulong)))


def node_of_device(pci_id: str, sysfs: Path = SYSFS) -> int | None:
    """Return the memory node nearest to a PCI device.

    Args:
        pci_id: "domain:bus:device.function" in hexadecimal, the CUDA driver's format.
        sysfs: where the kernel describes the machine.

    Returns:
        The node's number; None if there is only one node, or if the firmware gives no node for the device.
    """
    online = sorted((sysfs / "devices/system/node").glob("node[0-9]*"))
    try:
        node = int((sysfs / "bus/pci/devices" / pci_id.lower() / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 and len(online) > 1 else None


def prefer_node(address: int, nbytes: int, node: int) -> bool:
    """Let the pages of a mapping that is not touched yet come from one node, as long as that node has free pages.

    Uses MPOL_PREFERRED and not MPOL_BIND: the pool is sized from the free memory of the whole host, and may be larger
    than that of one node. With MPOL_BIND the process would be killed instead of getting slower pages of other nodes.

    Args:
        address, nbytes: the mapping, at page boundaries.
        node: memory node.

    Returns:
        True; False, and a warning, if the kernel refuses (containers often forbid it).
    """
    numbers = _SYSCALLS.get(platform.machine())
    if numbers is not None:
        mask = _NodeMask()
        mask[node // (8 * ctypes.sizeof(ctypes.c_ulong))] = 1 << node % (8 * ctypes.sizeof(ctypes.c_ulong))
        arguments = ctypes.c_void_p(address), ctypes.c_ulong(nbytes), ctypes.c_int(MPOL_PREFERRED)
        limit = ctypes.c_ulong(MOST_NODES + 1)  # the kernel takes one less
        if _libc.syscall(ctypes.c_long(numbers[0]), *arguments, mask, limit, ctypes.c_uint(0)) == 0:
            return True
    reason = f"no mbind on {platform.machine()}" if numbers is None else os.strerror(ctypes.get_errno())
    logger.warning(
        "Host KV memory may be far from the GPU, because it cannot be placed on NUMA node %d (%s): "
        "allow mbind (in a container: --cap-add SYS_NICE), or start the server under `numactl --preferred=%d`.",
        node,
        reason,
        node,
    )
    return False


def policy_at(address: int) -> tuple[int, list[int]]:
    """Return (mode, nodes) of the memory policy at an address.

    Raises:
        OSError: the kernel does not return a policy.
    """
    mode, mask = ctypes.c_int(), _NodeMask()
    number = ctypes.c_long(_SYSCALLS[platform.machine()][1])
    where = ctypes.c_void_p(address), ctypes.c_ulong(MPOL_F_ADDR)
    if _libc.syscall(number, ctypes.byref(mode), mask, ctypes.c_ulong(MOST_NODES + 1), *where) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    bits = 8 * ctypes.sizeof(ctypes.c_ulong)
    return mode.value, [node for node in range(MOST_NODES) if mask[node // bits] >> node % bits & 1]
