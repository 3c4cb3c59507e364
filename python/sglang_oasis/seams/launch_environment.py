"""What a launch needs from the machine: a free port, a whole model folder, threads that share the cores.

Read from sglang 0.5.23: `utils/numa_utils.init_threads_binding` (SGLANG_CPU_OMP_THREADS_BIND).
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path

from sglang_oasis.errors import LookaheadKVError

_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")


def wait_passively() -> None:
    """Let OpenMP threads of the processes to be started sleep at barriers instead of spinning.

    The forward pass shares the cores with the background pipeline. A thread that spins while its partner is
    descheduled blocks both: on a machine whose cores are all busy, a decode step took 60 times as long. A value of
    OMP_WAIT_POLICY that is set already stays.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def divide_cores(ranks: int) -> None:
    """Give each of this host's ranks cores of its own, as far as there are enough.

    SGLang gives a rank a NUMA node, and ends late where there are fewer nodes than ranks and no variable names
    the cores. What a user has set stays.
    """
    from sglang.srt.utils.numa_utils import get_cpu_ids_by_node

    if ranks <= max(1, len(get_cpu_ids_by_node())):
        return
    cores = sorted(os.sched_getaffinity(0))
    each = max(1, len(cores) // ranks)
    shares = [[cores[(rank * each + core) % len(cores)] for core in range(each)] for rank in range(ranks)]
    os.environ.setdefault("SGLANG_CPU_OMP_THREADS_BIND", "|".join(",".join(map(str, share)) for share in shares))
    os.environ.setdefault("OMP_NUM_THREADS", str(each))


def check_port(host: str | None, port: int) -> None:
    """Refuse a port that something listens on; SGLang itself would notice only after it has loaded the model.

    Raises:
        LookaheadKVError: the port is in use.
    """
    address = host or "127.0.0.1"
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port))
        except (OSError, OverflowError) as error:
            reason = error.strerror if isinstance(error, OSError) else "ports are 0 to 65535"
            raise LookaheadKVError(
                f"port {port} on {address} cannot be used ({reason}): stop what listens there or choose another --port."
            ) from None


def check_model_folder(folder: Path, *, flag: str = "--model-path", weights: bool = True) -> None:
    """Refuse a model folder with files missing or cut short.

    Only what is there is read: the configuration, the shard index and each safetensors header.

    Args:
        folder: the model folder.
        flag: what named it.
        weights: whether weights will be loaded from it.

    Raises:
        LookaheadKVError: names the file.
    """
    config = folder / "config.json"
    try:
        json.loads(config.read_text())
    except FileNotFoundError:
        raise LookaheadKVError(f"{folder} is not a model folder, config.json is missing: check {flag}.") from None
    except ValueError:
        raise _damaged(config, "not valid JSON") from None
    if not weights:
        return
    if not any(file.suffix in _WEIGHT_SUFFIXES for file in folder.iterdir()):
        raise LookaheadKVError(f"the model folder {folder} has no weights: download or convert the model again.")
    for shard in _shards(folder):
        _check_safetensors(shard)


def _shards(folder: Path) -> Iterator[Path]:
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        yield from sorted(folder.glob("*.safetensors"))
        return
    try:
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError):
        raise _damaged(index, "not a valid shard index") from None
    yield from (folder / name for name in names)


def _check_safetensors(shard: Path) -> None:
    if not shard.exists():
        raise _damaged(shard, "missing")
    size = shard.stat().st_size
    with shard.open("rb") as file:
        header_size = int.from_bytes(file.read(8), "little")
        header = file.read(header_size) if header_size <= size - 8 else b""
    try:
        tensors = json.loads(header)
        end = max((t["data_offsets"][1] for name, t in tensors.items() if name != "__metadata__"), default=0)
    except (ValueError, KeyError, TypeError, AttributeError):
        raise _damaged(shard, "its header is cut short") from None
    if size != 8 + header_size + end:
        raise _damaged(shard, f"{size} bytes long, its header promises {8 + header_size + end}")


def _damaged(file: Path, fault: str) -> LookaheadKVError:
    return LookaheadKVError(f"the model file {file} is damaged ({fault}): download or convert the model again.")
