"""Compares the CPU kernels with the memory bandwidth and torch's matrix products, on all instruction sets.

    python -m benchmark.micro.kernels

Each instruction set has a process of its own, in which torch uses it, too. Before and after every decode attention the
same process reads a large buffer with the same threads; the kernel's rate is given as a share of that rate. It cycles
through several layers, more than the caches hold. Pages of the host pool are in the order in which SGLang's allocator
assigns them, or shuffled; slots of the resident tier are always adjacent. Before and after every extend attention the
process multiplies matrices in float32 with the same threads.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from matplotlib.figure import Figure

from benchmark import report
from sglang_oasis.config import LookaheadKVConfig
from sglang_oasis.kernels.cpu import native, overrides
from sglang_oasis.lookahead.pipelines.base import PredictionStep
from sglang_oasis.lookahead.pipelines.native import NativePipeline
from sglang_oasis.lookahead.selectors import BoundSelector
from sglang_oasis.ops.attention import paged_attention
from sglang_oasis.testing.torch_limits import TORCH_LIMITS
from sglang_oasis.tier.host_pool import HostPool
from sglang_oasis.tier.layout import TierLayout
from sglang_oasis.tier.resident_tier import ResidentTier

BLOCK = 16
BYTES_BEYOND_CACHES = 400e6
PROBE_WORDS = 1 << 26
MATRIX = 1024
ANY_CPU = torch.tensor([], dtype=torch.int64)


class Heads(NamedTuple):
    """The heads of one attention layer."""

    kv_heads: int
    group: int
    head_dim: int

    def __str__(self) -> str:
        return f"{self.kv_heads * self.group}/{self.kv_heads} heads of {self.head_dim}"


REFERENCE_MODEL, EIGHT_BILLION = Heads(3, 3, 64), Heads(8, 4, 128)


class Dtypes(NamedTuple):
    """The dtypes of K and V, and of the query."""

    stored: torch.dtype
    query: torch.dtype

    def __str__(self) -> str:
        stored, query = (str(dtype).removeprefix("torch.") for dtype in self)
        return stored if stored == query else f"{stored}, {query} query"


DTYPES = (
    Dtypes(torch.bfloat16, torch.bfloat16),
    Dtypes(torch.bfloat16, torch.float32),
    Dtypes(torch.float32, torch.float32),
)


@dataclass(frozen=True)
class Result:
    """One kernel at one shape on one instruction set; medians over the repeats.

    Attributes:
        kernel, shape: names of the kernel and of the shape.
        dtype: dtype of K and V, and of the query if it differs.
        microseconds: time of one call (one layer).
        gigabytes: bytes of K and V that it reads per second / 10^9; None where compute is the limit.
        probe_gigabytes: bytes that the probe reads per second / 10^9, before and after the kernel.
        share: share of the probe's rate that the kernel reaches.
        gigaflops: operations per second / 10^9, None where memory is the limit.
        matmul_gigaflops: the same for torch's float32 matrix product, before and after the kernel.
        matmul_share: share of the matrix product's rate that the kernel reaches.
        versus_torch: how many times faster than torch's own kernel for it, None where torch has none.
    """

    kernel: str
    shape: str
    dtype: str
    microseconds: float
    gigabytes: float | None = None
    probe_gigabytes: float | None = None
    share: float | None = None
    gigaflops: float | None = None
    matmul_gigaflops: float | None = None
    matmul_share: float | None = None
    versus_torch: float | None = None


@dataclass(frozen=True)
class Measured:
    """All results of one instruction set, with the machine's rates in the same process.

    Attributes:
        instruction_set: instruction set of the kernels.
        torch_limits: environment variables that limit torch to it; empty if torch uses all that the machine has.
        probe_gigabytes: bytes read per second / 10^9, median of all probes.
        matmul_gigaflops: rate of torch's float32 matrix product, median.
        results: one per kernel and shape.
    """

    instruction_set: str
    torch_limits: dict[str, str]
    probe_gigabytes: float
    matmul_gigaflops: float
    results: list[Result]


def seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


class Probe:
    """Measures the memory and compute rates of this process, on the kernels' threads."""

    def __init__(self) -> None:
        self._words = torch.ones(PROBE_WORDS, dtype=torch.int64)
        self._matrices = torch.randn(2, MATRIX, MATRIX)
        self.bandwidths: list[float] = []
        self.matmuls: list[float] = []

    def bandwidth(self) -> float:
        """Return the bytes per second that the threads read."""
        self.bandwidths.append(self._words.nbytes / seconds(lambda: native.kernels().read_memory(self._words)))
        return self.bandwidths[-1]

    def matmul(self) -> float:
        """Return the operations per second of torch's float32 matrix product."""
        self.matmuls.append(2 * MATRIX**3 / seconds(lambda: self._matrices[0] @ self._matrices[1]))
        return self.matmuls[-1]


def against(
    probe: Callable[[], float], run: Callable[[], object], work: float, repeats: int
) -> tuple[float, float, float]:
    """Return medians of (seconds, the probe's rate, share of it); the probe runs before and after every repeat."""
    run()
    times, rates, shares = [], [], []
    for _ in range(repeats):
        before = probe()
        times.append(seconds(run))
        rates.append(statistics.mean((before, probe())))
        shares.append(work / times[-1] / rates[-1])
    return statistics.median(times), statistics.median(rates), statistics.median(shares)


def decode_attention(
    probe: Probe, *, batch: int, tokens: int, heads: Heads, dtypes: Dtypes, where: str, repeats: int
) -> Result:
    """Measure one decode step's attention; `where` is "resident", "pages in order" or "pages shuffled"."""
    blocks = tokens // BLOCK
    layer_bytes = batch * blocks * heads.kv_heads * 2 * BLOCK * heads.head_dim * dtypes.stored.itemsize
    layers = max(2, int(BYTES_BEYOND_CACHES // layer_bytes))
    resident = where == "resident"
    shape = (batch, heads.kv_heads, blocks) if resident else (batch * blocks, heads.kv_heads)
    first = torch.randn((*shape, 2, BLOCK, heads.head_dim)).to(dtypes.stored)
    pools = [first.clone() for _ in range(layers)]
    if resident:
        slots = torch.arange(blocks).expand(batch, blocks)
    else:
        order = torch.randperm(batch * blocks) if where == "pages shuffled" else torch.arange(batch * blocks)
        slots = order.view(batch, blocks)
    query = torch.randn(batch, heads.kv_heads * heads.group, heads.head_dim).to(dtypes.query)
    table = (
        torch.arange(batch),
        slots.int().contiguous(),
        torch.full((batch,), tokens, dtype=torch.int32),
        torch.arange(batch + 1, dtype=torch.int32),
    )

    def run() -> None:
        for pool in pools:
            paged_attention(query, pool, *table, heads.head_dim**-0.5)

    size = layers * layer_bytes
    taken, rate, share = against(probe.bandwidth, run, size, repeats)
    return Result(
        f"decode attention, {where}",
        f"batch {batch}, {tokens} tokens, {heads}",
        str(dtypes),
        taken / layers * 1e6,
        gigabytes=size / taken / 1e9,
        probe_gigabytes=rate / 1e9,
        share=share,
    )


def extend_attention(probe: Probe, *, tokens: int, prefix: int, heads: Heads, dtypes: Dtypes, repeats: int) -> Result:
    """Measure a prefill chunk on a cached prefix; stock SGLang calls torch's fused attention for a cold prompt."""
    length = tokens + prefix
    blocks = -(-length // BLOCK)
    query_heads, dim = heads.kv_heads * heads.group, heads.head_dim
    pool = torch.randn(blocks, heads.kv_heads, 2, BLOCK, dim).to(dtypes.stored)
    query = torch.randn(tokens, query_heads, dim).to(dtypes.query)
    table = (
        torch.zeros(1, dtype=torch.int64),
        torch.arange(blocks, dtype=torch.int32)[None],
        torch.tensor([length], dtype=torch.int32),
        torch.tensor([0, tokens], dtype=torch.int32),
    )
    operations = 4 * tokens * (prefix + tokens / 2) * query_heads * dim
    taken, rate, share = against(
        probe.matmul, lambda: paged_attention(query, pool, *table, dim**-0.5), operations, repeats
    )
    fused = None
    if prefix == 0:
        dense_query, dense_keys, dense_values = torch.randn(3, 1, query_heads, tokens, dim).to(dtypes.query)
        attention = torch.nn.functional.scaled_dot_product_attention

        def run() -> None:
            attention(dense_query, dense_keys, dense_values, is_causal=True)

        times = [seconds(run) for _ in range(repeats + 1)]
        fused = statistics.median(times[1:])
    return Result(
        "extend attention",
        f"{tokens} new on {prefix}, {heads}",
        str(dtypes),
        taken * 1e6,
        gigaflops=operations / taken / 1e9,
        matmul_gigaflops=rate / 1e9,
        matmul_share=share,
        versus_torch=None if fused is None else fused / taken,
    )


def pipeline_stages(*, batch: int, tokens: int, budget: int, summary: str, repeats: int) -> list[Result]:
    """Measure predict, select and transfer of one layer, on one thread as in the background, at fetch ratio 0.05."""
    kv_heads, group, head_dim = REFERENCE_MODEL
    flags = {"lookahead_kv_budget_tokens": budget, "lookahead_kv_summary_dtype": summary}
    layout = TierLayout.of(
        LookaheadKVConfig.from_flags(flags, BLOCK),
        num_layers=8,
        kv_heads=kv_heads,
        head_dim=head_dim,
        dtype=torch.bfloat16,
        context_length=tokens + BLOCK,
    )
    blocks = tokens // BLOCK
    pages = torch.arange(batch * blocks, dtype=torch.int32).view(batch, blocks)
    host = HostPool(
        num_pages=batch * blocks,
        num_layers=layout.num_layers,
        kv_heads=kv_heads,
        block_size=BLOCK,
        head_dim=head_dim,
        dtype=layout.dtype,
        summary_format=layout.summary_format,
    )
    tier = ResidentTier(layout, batch, torch.device("cpu"))
    for index, layer in enumerate(tier.layers):
        host.kv[index].copy_(torch.randn(host.kv[index].shape))
        host.summarise(index, torch.arange(batch * blocks))
        layer.summaries[:, :, :blocks] = host.summaries[index].view(batch, blocks, kv_heads, -1).transpose(1, 2)
        layer.head_map[:] = layer.slot_of[:, :, : layer.selected] = torch.arange(layer.selected, dtype=torch.int32)
    pipeline = NativePipeline(tier, host, BoundSelector(0.6))
    cap = max(1, int(0.05 * tier.layers[0].selected))
    native.kernels().configure_threads(1, ANY_CPU)
    per_stage: dict[str, list[float]] = {}
    fetched = 0
    for number in range(1, repeats + 2):
        candidates = torch.full((batch,), blocks - 1)
        pipeline.begin_urgent(PredictionStep(number, torch.arange(batch), torch.arange(batch), candidates, pages))
        query = torch.randn(batch, 1, kv_heads * group, head_dim).bfloat16()
        before = pipeline.statistics()
        for index in range(layout.num_layers):
            pipeline.run(index, query, head_dim**-0.5, cap)
        after = pipeline.statistics()
        fetched += after.fetched - before.fetched
        for stage, total in after.seconds.items():
            per_stage.setdefault(stage, []).append((total - before.seconds[stage]) / layout.num_layers)
    native.kernels().configure_threads(torch.get_num_threads(), ANY_CPU)
    pipeline.close()
    rate = {
        "transfer": fetched / (repeats + 1) / layout.num_layers * layout.chunk_bytes,
    }
    shape = f"batch {batch}, {tokens} tokens, K={budget // BLOCK}"
    results = []
    for stage, times in per_stage.items():
        taken = statistics.median(times[1:])
        speed = rate[stage] / taken / 1e9 if stage in rate else None
        results.append(Result(f"{stage} (one thread)", shape, summary, taken * 1e6, speed))
    return results


def measure(repeats: int) -> Measured:
    """Measure every kernel, on the instruction set of this process."""
    probe = Probe()
    results = []
    for where, batch, tokens, heads in report.progress(
        [
            ("pages in order", 8, 4096, REFERENCE_MODEL),
            ("pages in order", 8, 4096, EIGHT_BILLION),
            ("pages in order", 1, 8192, REFERENCE_MODEL),
            ("pages shuffled", 8, 4096, REFERENCE_MODEL),
            ("pages shuffled", 8, 4096, EIGHT_BILLION),
            ("resident", 8, 4096, REFERENCE_MODEL),
            ("resident", 16, 1040, REFERENCE_MODEL),
        ],
        f"decode attention, {native.kernels().instruction_set()}",
    ):
        for dtypes in DTYPES:
            results.append(
                decode_attention(
                    probe, batch=batch, tokens=tokens, heads=heads, dtypes=dtypes, where=where, repeats=repeats
                )
            )
    for heads, tokens, prefix in (
        (REFERENCE_MODEL, 2048, 0),
        (EIGHT_BILLION, 2048, 0),
        (REFERENCE_MODEL, 512, 3584),
        (REFERENCE_MODEL, 16, 3900),
    ):
        for dtypes in DTYPES:
            results.append(
                extend_attention(probe, tokens=tokens, prefix=prefix, heads=heads, dtypes=dtypes, repeats=repeats)
            )
    for summary in ("int4", "int8", "bf16"):
        results += pipeline_stages(batch=16, tokens=6144, budget=1024, summary=summary, repeats=repeats)
    return Measured(
        native.kernels().instruction_set(),
        {name: os.environ[name] for name in TORCH_LIMITS["avx2"] if name in os.environ},
        statistics.median(probe.bandwidths) / 1e9,
        statistics.median(probe.matmuls) / 1e9,
        results,
    )


def measure_all(repeats: int) -> Iterator[Measured]:
    """Yield the results of every instruction set, fastest first, each from its own process, which can use only one."""
    for name in native.kernels().instruction_sets():
        environment = {**os.environ, "SGLANG_OASIS_CPU_ISA": name, **TORCH_LIMITS.get(name, {})}
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "measured.json"
            command = [sys.executable, "-m", "benchmark.micro.kernels", "--repeats", str(repeats), "--here", str(file)]
            subprocess.run(command, env=environment, check=True)
            fields = json.loads(file.read_text())
        yield Measured(**{**fields, "results": [Result(**result) for result in fields["results"]]})


def show(measured: Measured) -> None:
    def cell(value: float | None, form: str) -> str:
        return "" if value is None else format(value, form)

    report.show_table(
        f"CPU kernels ({measured.instruction_set}, {torch.get_num_threads()} threads; the machine reads "
        f"{measured.probe_gigabytes:.1f} GB/s, torch multiplies {measured.matmul_gigaflops:.0f} GFLOP/s)",
        ("kernel", "shape", "dtype", "us", "GB/s", "of probe", "GFLOP/s", "of matmul", "x torch"),
        [
            (
                *(r.kernel, r.shape, r.dtype, f"{r.microseconds:.0f}", cell(r.gigabytes, ".1f"), cell(r.share, ".0%")),
                *(cell(r.gigaflops, ".0f"), cell(r.matmul_share, ".0%"), cell(r.versus_torch, ".2f")),
            )
            for r in measured.results
        ],
    )


def plot(sets: Sequence[Measured]) -> Figure:
    """Draw the shares of the probe's bandwidth and of torch's matrix products, with a bar per instruction set."""
    rows = {
        "share": [r for r in sets[0].results if r.share is not None],
        "matmul_share": [r for r in sets[0].results if r.matmul_share is not None],
    }
    figure = Figure(figsize=(9, 0.08 * len(sets) * sum(map(len, rows.values())) + 2.5))
    all_axes = figure.subplots(2, height_ratios=[len(results) for results in rows.values()])
    titles = "share of what the machine reads per second", "share of torch's float32 matrix product"
    for axes, (field, results), title in zip(all_axes, rows.items(), titles, strict=True):
        for number, measured in enumerate(sets):
            of = {(r.kernel, r.shape, r.dtype): getattr(r, field) for r in measured.results}
            shares = [of[r.kernel, r.shape, r.dtype] for r in results]
            height = 0.8 / len(sets)
            places = [place - 0.4 + (number + 0.5) * height for place in range(len(results))]
            axes.barh(places, shares, height=height, label=measured.instruction_set)
        axes.set_yticks(range(len(results)), [f"{r.kernel}, {r.shape}, {r.dtype}" for r in results], fontsize=7)
        axes.axvline(0.6, color="black", linestyle="--", linewidth=1)
        axes.invert_yaxis()
        axes.set(xlabel=title)
    all_axes[0].legend(fontsize=7)
    figure.tight_layout()
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--here", metavar="FILE", help="measure in this process only, and write JSON to a file")
    options = parser.parse_args()
    if native.load() is None or not overrides.serves(REFERENCE_MODEL.head_dim):
        raise SystemExit("The CPU kernels are not available here: see the warning above.")
    if options.here:
        Path(options.here).write_text(json.dumps(asdict(measure(options.repeats))))
        return
    unlimited = Probe()
    sets = []
    for measured in measure_all(options.repeats):
        show(measured)
        sets.append(measured)
    rates = [unlimited.matmul() for _ in range(options.repeats + 1)]
    report.save(
        "kernels",
        {
            "torch_matmul_gigaflops_without_limits": statistics.median(rates[1:]) / 1e9,
            "instruction_sets": [asdict(measured) for measured in sets],
        },
        plot(sets),
    )


if __name__ == "__main__":
    main()
