"""What a launch needs from the machine: a port, a whole model folder, threads that share the cores, code for its CPU.

Read from sglang 0.5.23: `utils/numa_utils.init_threads_binding` (SGLANG_CPU_OMP_THREADS_BIND),
`environ.third_party_cache_defaults` (TORCHINDUCTOR_CACHE_DIR, which SGLang sets when it is imported).
"""

from __future__ import annotations

import errno
import json
import math
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sglang_oasis.cpus import allowed_cpus, instruction_sets, usable_cpus
from sglang_oasis.errors import LookaheadKVError

_HIGHEST_PORT = 65535
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")


def share_the_cores() -> None:
    """Set OpenMP variables for the processes to be started, unless the user has set them.

    Threads sleep at barriers instead of spinning: the forward pass shares the cores with the background pipeline, and a
    thread that spins while its partner is descheduled blocks both. With spinning threads, a decode step took 60 times
    as long on a machine whose cores are all busy. Where a container limits CPU time, the number of threads follows this
    limit, because OpenMP and torch count CPUs only. The native threads use torch's number.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if (threads := usable_cpus()) < allowed_cpus():
        os.environ.setdefault("OMP_NUM_THREADS", str(threads))


def cache_compiled_code_by_cpu() -> None:
    """Give torch's compiler a cache folder for this kind of CPU, unless the user has chosen a folder.

    torch 2.13 finds a compiled graph without looking at the CPU, and compiles the source that it finds there for the
    CPU at hand. Loops that were written for vectors of AVX2 then write beyond their arrays with AVX-512: a server with
    EAGLE-3, some of whose functions SGLang compiles, ends with "malloc_consolidate(): invalid chunk size" when its home
    was used on another kind of CPU before.
    """
    from sglang.srt.environ import third_party_cache_defaults

    variable = "TORCHINDUCTOR_CACHE_DIR"
    default = third_party_cache_defaults()[variable]
    if os.environ.get(variable, default) == default:
        os.environ[variable] = f"{default}-{instruction_sets()}"


def ranks_per_host(server_args: Any) -> int:
    """Return the number of ranks that share the memory of one host."""
    return max(1, server_args.tp_size * server_args.dp_size // server_args.nnodes)


def divide_cores(ranks: int) -> None:
    """Give each of this host's ranks its own cores, as far as there are enough, unless the user has assigned cores.

    SGLang gives each rank a NUMA node; if there are fewer nodes than ranks and no variable names the cores, it fails
    late.
    """
    from sglang.srt.utils.numa_utils import get_cpu_ids_by_node

    if ranks <= max(1, len(get_cpu_ids_by_node())):
        return
    cores = sorted(os.sched_getaffinity(0))
    each = max(1, len(cores) // ranks)
    shares = [[cores[(rank * each + core) % len(cores)] for core in range(each)] for rank in range(ranks)]
    os.environ.setdefault("SGLANG_CPU_OMP_THREADS_BIND", "|".join(",".join(map(str, share)) for share in shares))
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, min(each, usable_cpus() // ranks))))


def check_port(host: str | None, port: int) -> None:
    """Refuse a port that cannot be used, which SGLang itself would notice only after it has loaded the model.

    Raises:
        LookaheadKVError: the port is in use, or the host or the port does not exist.
    """
    for bound in _bind(host, port):
        bound.close()


def listen(host: str | None, port: int, backlog: int) -> list[socket.socket]:
    """Return listening sockets, one for each address of the host, as asyncio's servers do.

    Raises:
        LookaheadKVError: the port has been taken since it was checked.
    """
    listening = _bind(host, port)
    for bound in listening:
        try:
            bound.listen(backlog)
        except OSError as error:
            raise _unusable(host, port, error.strerror) from None
        bound.setblocking(False)
    return listening


def _bind(host: str | None, port: int) -> list[socket.socket]:
    """Return a bound socket for each address of the host that this machine has."""
    bound: list[socket.socket] = []
    missing = None
    try:
        if not 0 <= port <= _HIGHEST_PORT:
            raise OSError(errno.EINVAL, f"ports are 0 to {_HIGHEST_PORT}")
        for family, kind, protocol, _, address in socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        ):
            try:
                bound.append(_bound(family, kind, protocol, address))
            except OSError as error:
                if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                    raise
                missing = error
        if missing is not None and not bound:
            raise missing
    except OSError as error:
        for opened in bound:
            opened.close()
        raise _unusable(host, port, error.strerror) from None
    return bound


def _bound(family: int, kind: int, protocol: int, address: Any) -> socket.socket:
    created = socket.socket(family, kind, protocol)
    try:
        created.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            created.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        created.bind(address)
    except OSError:
        created.close()
        raise
    return created


def _unusable(host: str | None, port: int, reason: str | None) -> LookaheadKVError:
    return LookaheadKVError(
        f"port {port} on {host or 'any address'} cannot be used ({reason}): stop the program that uses it or choose "
        f"another --port."
    )


def check_model_folder(folder: Path, *, flag: str = "--model-path", weights: bool = True) -> None:
    """Refuse a model folder with missing or truncated files.

    Reads the configuration and, if they exist, the shard index and the header of each safetensors file.

    Args:
        folder: the model folder.
        flag: the flag that named the folder.
        weights: whether weights will be loaded from it.

    Raises:
        LookaheadKVError: names the file.
    """
    config = folder / "config.json"
    try:
        json.loads(config.read_text())
    except FileNotFoundError:
        raise LookaheadKVError(f"config.json is missing in the model folder {folder}: check {flag}.") from None
    except ValueError:
        raise _damaged(config, "not valid JSON") from None
    if not weights:
        return
    if not any(file.suffix in _WEIGHT_SUFFIXES for file in folder.iterdir()):
        raise LookaheadKVError(f"the model folder {folder} has no weights: download or convert the model again.")
    for shard in _shards(folder):
        _check_safetensors(shard)


def parameters_in(folder: Path) -> int | None:
    """Return the number of parameters in a model folder's safetensors files, from their headers; None without files."""
    shards = list(_shards(folder)) if folder.is_dir() else []
    if not shards:
        return None
    return sum(math.prod(tensor["shape"]) for shard in shards for tensor in _header(shard)[1])


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
    header_size, tensors = _header(shard)
    promised = 8 + header_size + max((tensor["data_offsets"][1] for tensor in tensors), default=0)
    if (size := shard.stat().st_size) != promised:
        raise _damaged(shard, f"{size} bytes long, but its header says {promised}")


def _header(shard: Path) -> tuple[int, list[dict[str, Any]]]:
    """Return the bytes of a safetensors header, and its entry for each tensor: its position and its shape."""
    if not shard.exists():
        raise _damaged(shard, "missing")
    size = shard.stat().st_size
    with shard.open("rb") as file:
        header_size = int.from_bytes(file.read(8), "little")
        header = file.read(header_size) if header_size <= size - 8 else b""
    try:
        tensors = [tensor for name, tensor in json.loads(header).items() if name != "__metadata__"]
        if not all(isinstance(tensor["data_offsets"][1] + sum(tensor["shape"]), int) for tensor in tensors):
            raise TypeError
    except (ValueError, KeyError, TypeError, AttributeError, IndexError):
        raise _damaged(shard, "its header is cut short") from None
    return header_size, tensors


def _damaged(file: Path, fault: str) -> LookaheadKVError:
    return LookaheadKVError(f"the model file {file} is damaged ({fault}): download or convert the model again.")
