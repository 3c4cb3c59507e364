"""Rates of a decode step's kernels on a GPU, compared with the rates of its memory and its link in the same run.

    python -m benchmark.device.kernels --json build/device_kernels.json

Bytes are counted by `traffic.py` and `cuda_report.py` in scripts/kernel_reports. Calls cycle through several layers,
more than L2 can hold, in one CUDA graph, and other memory is written before each repeat, so L2 holds no data of a call.
Upper limits:

    device copy     copy of a large tensor, bytes read plus bytes written
    host to device  the copy engine, from pinned memory; device to host likewise
    zero copy       a kernel that reads pinned memory by address, as `fetch_blocks` does
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmark.device.timing import Spread, time_of
from scripts.kernel_reports import traffic
from scripts.kernel_reports.cuda_report import fetch_traffic, select_traffic
from scripts.kernel_reports.report_file import report_file
from scripts.kernel_reports.workload import QWEN3_8B, Workload
from sglang_oasis.kernels.cuda import native, overrides
from sglang_oasis.ops import device_step
from sglang_oasis.ops.device_step import (
    Admitting,
    Among,
    DeviceAdmissions,
    LayerState,
    Mark,
    NewTokens,
    Ranking,
    StepTable,
)
from sglang_oasis.ops.eviction import Maps
from sglang_oasis.ops.staging import PageCopies, TokenRuns, stage_pages, write_back
from sglang_oasis.testing.graphs import captured
from sglang_oasis.tier.host_memory.pinned import pinned_allocator
from sglang_oasis.tier.host_pool import Allocate, pageable

TINY = QWEN3_8B._replace(batch=2, heads=2, group=2, head_dim=16, selected=6, context=256, most=2)
LAYERS = 6
REPEATS = 15
FLUSH_BYTES, COPY_BYTES = 256 << 20, 1 << 30
TINY_BYTES = 1 << 16
DECAY, TIGHTNESS, SINKS = 0.9, 0.6, 1
STAGED_PAGES = 1024


class Layer(NamedTuple):
    """One layer of both tiers, with a step's tables."""

    blocks: Tensor
    maps: Maps
    summaries: Tensor
    averages: Tensor
    host_kv: Tensor
    host_summaries: Tensor
    req_to_token: Tensor
    indices: Tensor
    table: StepTable
    admissions: DeviceAdmissions
    predicted: Tensor
    queries: Tensor
    projected: Tensor


class Rate(NamedTuple):
    """The rate of a kernel or a copy.

    Attributes:
        name: its name.
        path: "memory" or "link", over which its bytes move.
        moved: bytes per call.
        seconds: per call.
    """

    name: str
    path: str
    moved: float
    seconds: Spread

    @property
    def gigabytes(self) -> float:
        """Gigabytes per second."""
        return self.moved / self.seconds.median / 1e9


def make_layer(load: Workload, host_kv: Tensor, host_summaries: Tensor, device: torch.device) -> Layer:
    """Make a layer with random contents, in which every (entry, head) admits C missing blocks into its first slots."""
    n, heads, size, dim = load.batch, load.heads, load.block_size, load.head_dim
    rows, logical, places = n + 1, load.blocks + 1, load.selected + load.local

    def int32(*shape: int, value: int = 0) -> Tensor:
        return torch.full(shape, value, dtype=torch.int32, device=device)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, device=device).to(load.dtype)

    order = torch.rand((rows, heads, load.blocks), device=device).argsort(-1).int()
    head_map = order[..., : load.selected].contiguous()
    slot_of = int32(rows, heads, logical, value=-1)
    slots = torch.arange(load.selected, dtype=torch.int32, device=device).expand_as(head_map)
    slot_of.scatter_(-1, head_map.long(), slots)
    missing = order[1:, :, load.selected : load.selected + load.most].contiguous()
    admitted = slots[1:, :, : load.most].contiguous()
    resident = head_map[1:, :, : load.selected - load.most]
    predicted = torch.cat([missing, resident], dim=-1).long().contiguous()
    summaries = torch.zeros((rows, heads, logical, load.record_bytes), dtype=torch.uint8, device=device)
    for row in range(1, rows):
        keys = random(load.blocks, heads, 2, size, dim)
        records = summaries.new_empty((load.blocks, heads, load.record_bytes))
        order_of_blocks = torch.arange(load.blocks, device=device)
        device_step.summarise_blocks(keys, order_of_blocks, records, order_of_blocks, load.fmt)
        summaries[row, :, : load.blocks] = records.transpose(0, 1)
    pages = torch.randperm(n * load.blocks, device=device).view(n, load.blocks)
    tokens = (pages[:, :, None] * size + torch.arange(size, device=device)).flatten(1).int()
    req_to_token = torch.nn.functional.pad(tokens, (0, size, 1, 0)).contiguous()
    # One entry in B completes a block, as on average.
    completed = int32(n, value=-1)
    completed[:: max(1, size // load.tokens)] = load.blocks - 1
    table = StepTable(
        rows=torch.arange(1, rows, device=device), lengths=int32(n, value=load.context - load.tokens + 1),
        graduates=int32(n, value=-1), completed=completed, expected=int32(n, value=-1), urgent=int32(n),
        candidates=int32(n, value=load.blocks), number=int32(1, value=50),
    )  # fmt: skip
    return Layer(
        blocks=random(rows, heads, places, 2, size, dim),
        maps=Maps(head_map, int32(*head_map.shape, value=1), slot_of),
        summaries=summaries,
        averages=torch.rand((rows, heads, logical), device=device) / load.blocks,
        host_kv=host_kv,
        host_summaries=host_summaries,
        req_to_token=req_to_token,
        indices=req_to_token[1:, load.context - load.tokens : load.context].long().flatten(),
        table=table,
        admissions=DeviceAdmissions(missing, admitted),
        predicted=predicted,
        queries=random(n, load.queries, heads * load.group, dim),
        projected=random(n * load.tokens, (load.group + 2) * heads, dim),
    )


def kernels(load: Workload, device: torch.device) -> Iterator[tuple[str, str, float, Callable[[Layer], object]]]:
    """Yield (name, path, bytes, call on a layer) of every available kernel."""
    one, counters = torch.ones(1, dtype=torch.int32, device=device), torch.zeros(2, dtype=torch.int64, device=device)
    cap = one * load.most
    scale, fmt, n = load.head_dim**-0.5, load.fmt, load.batch
    starts = torch.arange(n + 1, dtype=torch.int32, device=device)
    places = load.selected + load.local
    slots = torch.arange(places, dtype=torch.int32, device=device).repeat(n, 1)
    lengths = torch.full((n,), places * load.block_size, dtype=torch.int32, device=device)
    spare = DeviceAdmissions(*torch.full((2, n, load.heads, load.most), -1, dtype=torch.int32, device=device))
    scratch = torch.empty((n, load.heads, load.blocks + 1), device=device)

    ranking = Ranking(fmt, scale, TIGHTNESS, DECAY, SINKS)
    admitting = Admitting(cap, spare, counters)

    def among(layer: Layer) -> Among:
        return Among(layer.table.rows, layer.table.candidates)

    def take(layer: Layer) -> None:
        _, keys, values = layer.projected.split([load.group * load.heads, load.heads, load.heads], dim=1)
        device_step.take_tokens(state_of(layer), layer.table, NewTokens(layer.indices, keys, values), fmt)

    def score(layer: Layer) -> None:
        device_step.score_blocks(layer.queries, layer.summaries, among(layer), ranking, layer.averages)

    def select(layer: Layer) -> None:
        mark = Mark(layer.table.number, 1)
        device_step.select_admissions(layer.predicted, among(layer), layer.maps, mark, admitting)

    def fetch(layer: Layer) -> None:
        device_step.fetch_blocks(state_of(layer), layer.table.rows, layer.admissions, Mark(layer.table.number, 1))

    def attend(layer: Layer) -> None:
        query = layer.projected[:, : load.group * load.heads]
        device_step.attend(query, layer.blocks, layer.table.rows, slots, lengths, starts, scale, load.tokens)

    def fused(layer: Layer) -> None:
        mark = Mark(layer.table.number, 1)
        native.fused_select(layer.queries, state_of(layer), among(layer), ranking, mark, admitting, scratch)

    def fetch_native(layer: Layer) -> None:
        native.fetch_blocks(state_of(layer), layer.table.rows, layer.admissions, Mark(layer.table.number, 1))

    share = -(-n // max(1, load.block_size // load.tokens)) / n
    yield "take_tokens", "link", traffic.take_tokens(load, share).link, take
    yield "score_blocks", "memory", traffic.score_blocks(load).moved, score
    yield "select_admissions", "memory", traffic.select_admissions(load).moved, select
    yield "attend", "memory", traffic.attend(load).moved, attend
    yield "fetch_blocks", "link", traffic.fetch_blocks(load).link, fetch
    if device.type != "cuda" or native.load() is None:
        return
    selecting = select_traffic(
        entries=n, kv_heads=load.heads, query_heads=load.group * load.queries, head_dim=load.head_dim,
        element_bytes=load.dtype.itemsize, fmt=fmt, candidates=load.blocks, selected=load.selected,
        admitted=load.most, smoothing=True,
    )  # fmt: skip
    admissions = n * load.heads * load.most
    fetching = fetch_traffic(admissions=admissions, admitted=admissions, chunk_bytes=load.chunk_bytes)
    assert fetching.moved > admissions * load.chunk_bytes
    yield "fetch_blocks (C++)", "link", admissions * load.chunk_bytes, fetch_native
    yield "fused_select (C++)", "memory", selecting.moved, fused


def state_of(layer: Layer) -> LayerState:
    return LayerState(*layer[: len(LayerState._fields)])


def measure_kernels(load: Workload, device: torch.device, allocate: Allocate, tiny: bool) -> Iterator[Rate | str]:
    """Yield a rate per kernel, or a sentence about a kernel that failed."""
    pages = load.batch * load.blocks
    host_kv = allocate((pages, load.heads, 2, load.block_size, load.head_dim), load.dtype)
    host_summaries = allocate((pages, load.heads, load.record_bytes), torch.uint8)
    layers = [make_layer(load, host_kv, host_summaries, device) for _ in range(2 if tiny else LAYERS)]
    flush = torch.zeros(TINY_BYTES if tiny else FLUSH_BYTES, dtype=torch.uint8, device=device)
    for name, path, moved, call in kernels(load, device):

        def run(call: Callable[[Layer], object] = call) -> None:
            for layer in layers:
                call(layer)

        try:
            run()
            spread = time_of(captured(run, device), device, REPEATS, lambda: flush.add_(1))
        except RuntimeError as error:
            yield f"{name} failed: {str(error).splitlines()[0]}"
            continue
        yield Rate(name, path, moved, Spread(*(value / len(layers) for value in spread)))
    yield from measure_staging(load, device, host_kv, flush, tiny)


def measure_staging(load: Workload, device: torch.device, host_kv: Tensor, flush: Tensor, tiny: bool) -> Iterator[Rate]:
    count = min(8 if tiny else STAGED_PAGES, len(host_kv))
    places = torch.arange(count, dtype=torch.int32, device=device)
    none, nothing = torch.full_like(places, -1), torch.zeros_like(places)
    staging = torch.zeros((count, *host_kv.shape[1:]), dtype=host_kv.dtype, device=device)
    copies = PageCopies(places, places, none, none)
    runs = TokenRuns(places, places, nothing, torch.full_like(places, load.block_size))
    for name, run in (
        ("stage_pages", lambda: stage_pages(staging, staging[:1], host_kv, copies)),
        ("write_back", lambda: write_back(staging, host_kv, runs)),
    ):
        run()
        yield Rate(name, "link", staging.nbytes, time_of(run, device, REPEATS, lambda: flush.add_(1)))


def measure_ceilings(load: Workload, device: torch.device, allocate: Allocate, tiny: bool) -> Iterator[Rate]:
    """Yield the rates of the memory and of the link."""
    nbytes = TINY_BYTES if tiny else COPY_BYTES
    host = allocate((nbytes,), torch.uint8)
    here, there = (torch.ones(nbytes, dtype=torch.uint8, device=device) for _ in range(2))

    def timed(name: str, path: str, moved: float, run: Callable[[], object]) -> Rate:
        run()
        return Rate(name, path, moved, time_of(run, device, REPEATS, lambda: None))

    yield timed("device copy", "memory", 2 * nbytes, lambda: there.copy_(here))
    yield timed("host to device", "link", nbytes, lambda: here.copy_(host, non_blocking=True))
    yield timed("device to host", "link", nbytes, lambda: host.copy_(here, non_blocking=True))
    if device.type == "cuda":
        from benchmark.micro.zero_copy import read

        yield timed("zero copy", "link", nbytes, lambda: read(here, host))


def report(rates: list[Rate | str], ceilings: list[Rate]) -> dict[str, Any]:
    """Return JSON values: rates, their shares of the path's ceiling, and whether the C++ kernels could be loaded."""
    copies = {rate.name: rate.gigabytes for rate in ceilings}
    best = {"memory": copies["device copy"], "link": copies.get("zero copy", copies["host to device"])}
    written = {"take_tokens", "write_back"}

    def entry(rate: Rate) -> dict[str, Any]:
        ceiling = copies["device to host"] if rate.name in written else best[rate.path]
        spread = {name: round(1e6 * value, 3) for name, value in rate.seconds._asdict().items()}
        return {
            "name": rate.name, "path": rate.path, "bytes": rate.moved, "microseconds": spread,
            "gigabytes_per_second": round(rate.gigabytes, 2), "share_of_ceiling": round(rate.gigabytes / ceiling, 3),
        }  # fmt: skip

    return {
        "cpp_kernels": native.kernels() is not None,
        "ceilings": [entry(rate) for rate in ceilings],
        "kernels": [entry(rate) for rate in rates if isinstance(rate, Rate)],
        "failed": [rate for rate in rates if isinstance(rate, str)],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="sizes for a rehearsal; a CPU has no others")
    parser.add_argument("--json", type=report_file, help="write the record to this file")
    options = parser.parse_args()
    tiny = options.tiny or options.device == "cpu"
    device = torch.device(options.device, 0) if options.device == "cuda" else torch.device("cpu")
    allocate: Allocate = pageable
    if device.type == "cuda":
        overrides.install()
        allocate = pinned_allocator(device)
    load = TINY if tiny else QWEN3_8B
    ceilings = list(measure_ceilings(load, device, allocate, tiny))
    record = report(list(measure_kernels(load, device, allocate, tiny)), ceilings)
    for each in [*record["ceilings"], *record["kernels"]]:
        print(f"{each['name']:22}{each['microseconds']['median']:12.1f} us{each['gigabytes_per_second']:10.1f} GB/s "
              f"{each['share_of_ceiling']:6.0%} of {each['path']}")  # fmt: skip
    for sentence in record["failed"]:
        print(sentence)
    if options.json is not None:
        options.json.write_text(json.dumps(record, indent=1) + "\n")
    if record["failed"]:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
