"""The CPU kernels against the memory bandwidth of the machine.

    python -m benchmark.kernels

Around every decode attention the same process reads a large buffer with the same threads; what the kernel reaches is
given as a share of that. It runs over several layers in turn, more than the caches hold. Pages of the host pool are in
the order in which SGLang's allocator hands them out, or shuffled; slots of the resident tier always lie side by side.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import torch
from matplotlib.figure import Figure

from benchmark import report
from sglang_oasis.config import LookaheadKVConfig
from sglang_oasis.lookahead.pipeline import NativePipeline, PredictionStep
from sglang_oasis.lookahead.selector import BoundSelector
from sglang_oasis.ops import cpu, native
from sglang_oasis.ops.attention import paged_attention
from sglang_oasis.tier.host_pool import HostPool
from sglang_oasis.tier.layout import TierLayout
from sglang_oasis.tier.resident_tier import ResidentTier

KV_HEADS, GROUP, HEAD_DIM, BLOCK = 3, 3, 64, 16
"""Those of the reference model."""
BYTES_BEYOND_CACHES = 400e6
PROBE_WORDS = 1 << 26
SCALE = HEAD_DIM**-0.5
ANY_CPU = torch.tensor([], dtype=torch.int64)


@dataclass(frozen=True)
class Result:
    """One kernel at one shape; medians over the repeats.

    Attributes:
        kernel, shape: what ran.
        dtype: of K and V.
        microseconds: of one call (one layer).
        gigabytes: K and V that it reads per second / 10^9; None where compute is the limit.
        share: of what the probe reads per second.
        gigaflops: per second / 10^9, None where memory is the limit.
        versus_torch: how many times faster than torch's own kernel for it, None where torch has none.
    """

    kernel: str
    shape: str
    dtype: str
    microseconds: float
    gigabytes: float | None = None
    share: float | None = None
    gigaflops: float | None = None
    versus_torch: float | None = None


def seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


class Probe:
    """Reads a buffer with the kernels' threads: the bandwidth that this process can get."""

    def __init__(self) -> None:
        self._words = torch.ones(PROBE_WORDS, dtype=torch.int64)

    def bandwidth(self) -> float:
        """Bytes per second."""
        return self._words.nbytes / seconds(lambda: native.kernels().read_memory(self._words))


def against_probe(probe: Probe, run: Callable[[], object], size: float, repeats: int) -> tuple[float, float, float]:
    """(seconds, bytes per second, share of the probe's), medians; the probe runs before and after every repeat."""
    run()
    times, shares = [], []
    for _ in range(repeats):
        before = probe.bandwidth()
        times.append(seconds(run))
        shares.append(size / times[-1] / statistics.mean((before, probe.bandwidth())))
    return statistics.median(times), size / statistics.median(times), statistics.median(shares)


def decode_attention(probe: Probe, *, batch: int, tokens: int, dtype: torch.dtype, where: str, repeats: int) -> Result:
    """One decode step's attention: `where` is "resident", "pages in order" or "pages shuffled"."""
    blocks = tokens // BLOCK
    layer_bytes = batch * blocks * KV_HEADS * 2 * BLOCK * HEAD_DIM * dtype.itemsize
    layers = max(2, int(BYTES_BEYOND_CACHES // layer_bytes))
    resident = where == "resident"
    shape = (batch, KV_HEADS, blocks) if resident else (batch * blocks, KV_HEADS)
    pools = [torch.randn((*shape, 2, BLOCK, HEAD_DIM)).to(dtype) for _ in range(layers)]
    if resident:
        slots = torch.arange(blocks).expand(batch, blocks)
    else:
        order = torch.randperm(batch * blocks) if where == "pages shuffled" else torch.arange(batch * blocks)
        slots = order.view(batch, blocks)
    query = torch.randn(batch, KV_HEADS * GROUP, HEAD_DIM).to(dtype)
    table = (
        torch.arange(batch),
        slots.int().contiguous(),
        torch.full((batch,), tokens, dtype=torch.int32),
        torch.arange(batch + 1, dtype=torch.int32),
    )

    def run() -> None:
        for pool in pools:
            paged_attention(query, pool, *table, SCALE)

    taken, rate, share = against_probe(probe, run, layers * layer_bytes, repeats)
    name = f"decode attention, {where}"
    return Result(name, f"batch {batch}, {tokens} tokens", _name(dtype), taken / layers * 1e6, rate / 1e9, share)


def extend_attention(*, tokens: int, prefix: int, dtype: torch.dtype, repeats: int) -> Result:
    """A prefill chunk on a cached prefix; torch's fused attention, for a cold prompt, is what stock SGLang calls."""
    length = tokens + prefix
    blocks = -(-length // BLOCK)
    pool = torch.randn(blocks, KV_HEADS, 2, BLOCK, HEAD_DIM).to(dtype)
    query = torch.randn(tokens, KV_HEADS * GROUP, HEAD_DIM).to(dtype)
    table = (
        torch.zeros(1, dtype=torch.int64),
        torch.arange(blocks, dtype=torch.int32)[None],
        torch.tensor([length], dtype=torch.int32),
        torch.tensor([0, tokens], dtype=torch.int32),
    )
    dense = torch.randn(3, 1, KV_HEADS * GROUP, tokens, HEAD_DIM).to(dtype)
    dense_query, dense_keys, dense_values = dense
    fused_attention = torch.nn.functional.scaled_dot_product_attention
    times, ratios = [], []
    for _ in range(repeats + 1):
        times.append(seconds(lambda: paged_attention(query, pool, *table, SCALE)))
        if prefix == 0:
            fused = seconds(lambda: fused_attention(dense_query, dense_keys, dense_values, is_causal=True))
            ratios.append(fused / times[-1])
    operations = 4 * tokens * (prefix + tokens / 2) * KV_HEADS * GROUP * HEAD_DIM
    taken = statistics.median(times[1:])
    return Result(
        "extend attention",
        f"{tokens} new on {prefix}",
        _name(dtype),
        taken * 1e6,
        gigaflops=operations / taken / 1e9,
        versus_torch=statistics.median(ratios[1:]) if ratios else None,
    )


def pipeline_stages(*, batch: int, tokens: int, budget: int, summary: str, repeats: int) -> list[Result]:
    """Predict, select and transfer of one layer, on one thread as in the background, at fetch ratio 0.05."""
    flags = {"lookahead_kv_budget_tokens": budget, "lookahead_kv_summary_dtype": summary}
    layout = TierLayout.of(
        LookaheadKVConfig.from_flags(flags, BLOCK),
        num_layers=8,
        kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        dtype=torch.bfloat16,
        context_length=tokens + BLOCK,
    )
    blocks = tokens // BLOCK
    pages = torch.arange(batch * blocks, dtype=torch.int32).view(batch, blocks)
    host = HostPool(
        num_pages=batch * blocks,
        num_layers=layout.num_layers,
        kv_heads=KV_HEADS,
        block_size=BLOCK,
        head_dim=HEAD_DIM,
        dtype=layout.dtype,
        summary_format=layout.summary_format,
    )
    tier = ResidentTier(layout, batch, torch.device("cpu"))
    for index, layer in enumerate(tier.layers):
        host.kv[index].copy_(torch.randn(host.kv[index].shape))
        host.summarise(index, torch.arange(batch * blocks))
        layer.summaries[:, :, :blocks] = host.summaries[index].view(batch, blocks, KV_HEADS, -1).transpose(1, 2)
        layer.head_map[:] = layer.slot_of[:, :, : layer.selected] = torch.arange(layer.selected, dtype=torch.int32)
    pipeline = NativePipeline(tier, host, BoundSelector(0.6))
    cap = max(1, int(0.05 * tier.layers[0].selected))
    native.kernels().configure_threads(1, ANY_CPU)
    per_stage: dict[str, list[float]] = {}
    fetched = 0
    for number in range(1, repeats + 2):
        candidates = torch.full((batch,), blocks - 1)
        pipeline.begin_urgent(PredictionStep(number, torch.arange(batch), torch.arange(batch), candidates, pages))
        query = torch.randn(batch, 1, KV_HEADS * GROUP, HEAD_DIM).bfloat16()
        before = pipeline.statistics()
        for index in range(layout.num_layers):
            pipeline.run(index, query, SCALE, cap)
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


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def show(results: Sequence[Result]) -> None:
    def cell(value: float | None, form: str) -> str:
        return "" if value is None else format(value, form)

    report.show_table(
        f"CPU kernels ({native.kernels().instruction_set()}, {torch.get_num_threads()} threads)",
        ("kernel", "shape", "dtype", "us", "GB/s", "of probe", "GFLOP/s", "x torch"),
        [
            (
                *(r.kernel, r.shape, r.dtype, f"{r.microseconds:.0f}", cell(r.gigabytes, ".1f"), cell(r.share, ".0%")),
                *(cell(r.gigaflops, ".0f"), cell(r.versus_torch, ".2f")),
            )
            for r in results
        ],
    )


def plot(results: Sequence[Result]) -> Figure:
    """Shares of the probe's bandwidth."""
    bars = [r for r in results if r.share is not None]
    figure = Figure(figsize=(8, 0.35 * len(bars) + 1.2))
    axes = figure.subplots()
    axes.barh([f"{r.kernel}, {r.shape}, {r.dtype}" for r in bars], [r.share or 0.0 for r in bars])
    axes.axvline(0.7, color="black", linestyle="--", linewidth=1)
    axes.invert_yaxis()
    axes.set(xlabel="share of the probe's read bandwidth (dashed: the target)")
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=15)
    options = parser.parse_args()
    if native.load() is None or not cpu.serves(HEAD_DIM):
        raise SystemExit("The CPU kernels are not available here: see the warning above.")
    probe = Probe()
    cases = [
        (dtype, where, batch, tokens)
        for dtype in (torch.bfloat16, torch.float32)
        for where in ("pages in order", "pages shuffled", "resident")
        for batch, tokens in ((8, 4096), (1, 8192), (16, 1040))
        if where == "resident" or tokens > 1040
    ]
    results = [
        decode_attention(probe, batch=batch, tokens=tokens, dtype=dtype, where=where, repeats=options.repeats)
        for dtype, where, batch, tokens in report.progress(cases, "decode attention")
    ]
    for dtype in (torch.bfloat16, torch.float32):
        for tokens, prefix in ((3900, 0), (512, 3584), (16, 3900)):
            results.append(extend_attention(tokens=tokens, prefix=prefix, dtype=dtype, repeats=options.repeats))
    for summary in ("int4", "int8", "bf16"):
        results += pipeline_stages(batch=16, tokens=6144, budget=1024, summary=summary, repeats=options.repeats)
    show(results)
    probe_rate = statistics.median(probe.bandwidth() for _ in range(options.repeats))
    report.save(
        "kernels", {"probe_gigabytes": probe_rate / 1e9, "results": [asdict(r) for r in results]}, plot(results)
    )


if __name__ == "__main__":
    main()
