"""Gloo groups that share a device work as those with one each, between processes, and have one thread."""

from __future__ import annotations

import multiprocessing
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from sglang_oasis.seams import gloo_device

RANKS, GROUPS = 2, 5
LIMIT = 180
"""Seconds: a spawned process first imports torch, on a busy machine not as soon as the other one."""
TIMEOUT = timedelta(seconds=LIMIT - 10)


def loop_threads() -> int:
    names = [file.read_text().strip() for file in Path("/proc/self/task").glob("*/comm")]
    return names.count("gloo_tcp_loop")


def make_groups(rank: int, ranks: int, store: Path) -> list[dist.ProcessGroup]:
    """As SGLang makes them: one of all, then several, of which some have one rank."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks, timeout=TIMEOUT)
    groups = []
    for _ in range(GROUPS):
        groups.append(dist.new_group(list(range(ranks)), TIMEOUT, "gloo"))
        singles = [dist.new_group([single], TIMEOUT, "gloo") for single in range(ranks)]
        groups.append(singles[rank])
    return groups


def serve(rank: int, store: Path, found: multiprocessing.Queue[tuple[int, list[float], int]]) -> None:
    gloo_device.cpu_platform_wanted = lambda: True  # type: ignore[attr-defined]
    groups = gloo_device._on_one_device(make_groups, rank, RANKS, store)
    assert groups[0]._get_backend(torch.device("cpu")).options._timeout == TIMEOUT
    sums = []
    for group in groups:
        value = torch.tensor([float(rank + 1)])
        dist.all_reduce(value, group=group)
        sums.append(value.item())
    told = [None if rank else "spoken"]
    dist.broadcast_object_list(told, src=0, group=groups[0])
    assert told == ["spoken"]
    dist.barrier()
    found.put((rank, sums, loop_threads()))
    dist.destroy_process_group()


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="counts threads in /proc")
def test_groups_on_one_device_reduce_and_broadcast(tmp_path: Path) -> None:
    spawn = multiprocessing.get_context("spawn")
    found: multiprocessing.Queue[tuple[int, list[float], int]] = spawn.Queue()
    ranks = [spawn.Process(target=serve, args=(rank, tmp_path / "store", found), daemon=True) for rank in range(RANKS)]
    for process in ranks:
        process.start()
    results = sorted(found.get(timeout=LIMIT) for _ in ranks)
    for process in ranks:
        process.join(LIMIT)
        assert process.exitcode == 0
    for rank, sums, threads in results:
        assert sums == [3.0, rank + 1.0] * GROUPS
        assert threads == 1


def test_the_name_is_restored() -> None:
    original = dist.distributed_c10d.ProcessGroupGloo
    with pytest.raises(ZeroDivisionError):
        gloo_device._on_one_device(lambda: 1 // 0)
    assert dist.distributed_c10d.ProcessGroupGloo is original
