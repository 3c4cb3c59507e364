"""A decode step of a Qwen3-8B-shaped stack on a GPU: dense attention against lookahead in the same device memory.

    python -m benchmark.device.step --json build/device_step.json

Weights are random, queries are scripted (`benchmark/micro/stack.py`). Dense: all KV in device memory, as many rows as
fit into it, attention by FlashInfer's paged kernel or, if FlashInfer is absent, by torch's flash attention over
contiguous KV. Lookahead: as many rows as fit into the same memory, KV in pinned host memory. Both steps are captured in
a CUDA graph. If pinned memory is too small, several rows share the same few prompts; a row's fetches depend on its own
queries, so the link moves as many bytes. A step's time is the time between two successive steps, including the work of
the host between them.

Then the lookahead step runs without fetches, and without fetches and predictions: the differences are the costs of
transfers and predictions that the step does not hide.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from benchmark.device.timing import Marks, Spread
from benchmark.micro.stack import (
    BLOCK,
    DTYPE,
    STARTUP_QUERIES,
    Model,
    Shape,
    block_topics,
    lay_out,
    scripted_queries,
    topic_directions,
    topic_pages,
)
from scripts.kernel_reports.report_file import report_file
from sglang_oasis.config import DEFAULT_FETCH_RATIO
from sglang_oasis.engine.attention.base import AttentionSetup
from sglang_oasis.engine.attention.choice import choose_attention
from sglang_oasis.engine.base import EngineSetup
from sglang_oasis.engine.batch import DecodeBatch
from sglang_oasis.engine.device import DeviceEngine, DeviceSetup
from sglang_oasis.errors import LookaheadKVError
from sglang_oasis.ops.streams import streams_of
from sglang_oasis.testing.graphs import captured
from sglang_oasis.tier.host_memory.available import available_host_bytes
from sglang_oasis.tier.host_memory.pinned import pinned_allocator
from sglang_oasis.tier.host_pool import Allocate, HostPool, pageable

QWEN3_8B = Shape(layers=36, kv_heads=8, group=4, head_dim=128, hidden=4096, mlp=12288, vocabulary=151936, budget=2048)
TINY = Shape(layers=2, kv_heads=2, group=2, head_dim=16, hidden=32, mlp=32, vocabulary=64, budget=128)
WARM_UP, STEPS, WITHOUT = 8, 40, 12
"""Numbers of warm-up steps, of timed steps, and of timed steps without transfers or predictions."""
MOST_ROWS = 160
SECONDS_PER_CONTEXT = 45
"""Longest time of one context length."""


@dataclass(frozen=True)
class Limits:
    """The device and the memory that the benchmark may use.

    Attributes:
        device: the device.
        allocate: allocates host memory that the device can access.
        device_bytes: device memory for KV, the same for dense attention and for lookahead.
        host_bytes: host memory for the host pool.
    """

    device: torch.device
    allocate: Allocate
    device_bytes: int
    host_bytes: int


def steps_of(load: Callable[[], None], run: Callable[[], object], count: int, device: torch.device) -> Spread:
    """Return the time of a step, which is `load` on the host, then `run`."""
    marks = Marks(device)
    for _ in range(count):
        marks.mark()
        load()
        run()
    marks.mark()
    return Spread.of(marks.seconds())


def milliseconds(spread: Spread) -> dict[str, float]:
    return {name: round(1e3 * value, 4) for name, value in spread._asdict().items()}


class DenseStep:
    """A step in which every row attends to all its tokens; each step writes the same last token.

    Args:
        shape: the sizes.
        model: what runs between the attention calls.
        device: where.

    Attributes:
        attention: what attends.
    """

    def __init__(self, shape: Shape, model: Model, device: torch.device) -> None:
        self._shape, self._model = shape, model
        self._hidden = torch.randn(shape.batch, shape.hidden, device=device).to(DTYPE)
        self._query = torch.randn(shape.batch, shape.query_heads, shape.head_dim, device=device).to(DTYPE)
        paged = device.type == "cuda" and importlib.util.find_spec("flashinfer") is not None
        self.attention = "FlashInfer, paged" if paged else "torch, contiguous"
        self._attend = self._plan_paged(device) if paged else self._attend_contiguous
        heads, dim = shape.kv_heads, shape.head_dim
        blocks = shape.context // BLOCK
        kv_shape = (
            (shape.batch * blocks, 2, BLOCK, heads, dim) if paged else (2, shape.batch, heads, shape.context, dim)
        )
        self._kv = [torch.empty(kv_shape, dtype=DTYPE, device=device).normal_() for _ in range(shape.layers)]
        self._last = blocks - 1 + blocks * torch.arange(shape.batch, device=device)
        self._paged = paged

    def run(self) -> None:
        hidden = self._hidden
        for layer, kv in enumerate(self._kv):
            key, value = self._model.key_value(layer, hidden)
            if self._paged:
                kv[self._last, 0, BLOCK - 1], kv[self._last, 1, BLOCK - 1] = key, value
            else:
                kv[0, :, :, -1], kv[1, :, :, -1] = key, value
            hidden = self._model.after_attention(layer, hidden, self._attend(kv))
        self._model.logits(hidden)

    def _attend_contiguous(self, kv: Tensor) -> Tensor:
        query = self._query.unsqueeze(2)
        return torch.nn.functional.scaled_dot_product_attention(query, kv[0], kv[1], enable_gqa=True).squeeze(2)

    def _plan_paged(self, device: torch.device) -> Callable[[Tensor], Tensor]:
        from flashinfer import BatchDecodeWithPagedKVCacheWrapper

        shape, blocks = self._shape, self._shape.context // BLOCK
        count = shape.batch * blocks
        pages = torch.randperm(count, dtype=torch.int32, device=device)
        wrapper = BatchDecodeWithPagedKVCacheWrapper(
            torch.zeros(128 << 20, dtype=torch.uint8, device=device), "NHD", use_cuda_graph=True,
            use_tensor_cores=True, backend="fa2",
            paged_kv_indptr_buffer=torch.zeros(shape.batch + 1, dtype=torch.int32, device=device),
            paged_kv_indices_buffer=torch.zeros(count, dtype=torch.int32, device=device),
            paged_kv_last_page_len_buffer=torch.zeros(shape.batch, dtype=torch.int32, device=device),
        )  # fmt: skip
        wrapper.plan(
            blocks * torch.arange(shape.batch + 1, dtype=torch.int32), pages,
            torch.full((shape.batch,), BLOCK, dtype=torch.int32), shape.query_heads, shape.kv_heads, shape.head_dim,
            BLOCK, q_data_type=DTYPE, kv_data_type=DTYPE, sm_scale=shape.scale,
        )  # fmt: skip
        return lambda kv: wrapper.run(self._query, kv)


class LookaheadStep:
    """A step with the product's engine between the model's layers.

    Args:
        shape: the sizes.
        model: what runs between the attention calls.
        limits: memory.
        contexts: number of different prompts; row r has prompt r % contexts.
        steps: most steps.

    Attributes:
        engine: the product's.
        attention: what attends.
    """

    def __init__(self, shape: Shape, model: Model, limits: Limits, contexts: int, steps: int) -> None:
        device = limits.device
        self._shape, self._model, self._device = shape, model, device
        config, layout = lay_out(shape, steps, DEFAULT_FETCH_RATIO)
        blocks, tail = shape.context // BLOCK, layout.max_blocks - shape.context // BLOCK
        self._host = HostPool(
            num_pages=1 + contexts * blocks + shape.batch * tail, num_layers=shape.layers, kv_heads=shape.kv_heads,
            block_size=BLOCK, head_dim=shape.head_dim, dtype=DTYPE, summary_format=layout.summary_format,
            allocate=limits.allocate,
        )  # fmt: skip
        pages = torch.zeros(shape.batch + 1, layout.max_blocks, dtype=torch.int64)
        for row in range(1, shape.batch + 1):
            pages[row, :blocks] = 1 + (row - 1) % contexts * blocks + torch.arange(blocks)
            pages[row, blocks:] = 1 + contexts * blocks + (row - 1) * tail + torch.arange(tail)
        tokens = (pages[:, :, None] * BLOCK + torch.arange(BLOCK)).flatten(1)
        self._req_to_token = tokens.int().to(device)
        setup = AttentionSetup(layout, shape.query_heads, DTYPE, shape.scale, device, streams_of(device))
        attention = choose_attention(setup)
        self.attention = type(attention.decode).__name__
        self.engine = DeviceEngine(
            EngineSetup(config, layout, self._host, shape.batch + 1, self._req_to_token, [shape.scale] * shape.layers),
            DeviceSetup(device, shape.query_heads, DTYPE, attention=attention),
        )
        directions = topic_directions(shape, device)
        self._queries = scripted_queries(shape, steps, directions)
        self._build(contexts, directions)
        self._hidden = torch.randn(shape.batch, shape.hidden, device=device).to(DTYPE)
        self._query = torch.zeros_like(self._queries[0])
        self._indices = torch.zeros(shape.batch, dtype=torch.int64, device=device)
        self._rows = torch.arange(1, shape.batch + 1)
        self._decoded = 0

    def _build(self, contexts: int, directions: Tensor) -> None:
        """Write the prompts to the host pool, and build the first resident sets as the last prefill chunk does."""
        shape, tier, blocks = self._shape, self.engine.tier, self._shape.context // BLOCK
        window = tier.window(shape.context)
        for context in range(contexts):
            topics, first = block_topics(blocks), 1 + context * blocks
            rows = range(1 + context, shape.batch + 1, contexts)
            for layer in range(shape.layers):
                kv = topic_pages(shape, topics, directions[:, layer])
                self._host.kv[layer][first : first + blocks].copy_(kv)
                for row in rows:
                    startup = self._queries[:STARTUP_QUERIES, layer, row - 1]
                    self.engine.build(layer, row, window, kv, 0, startup)
        for row in range(1, shape.batch + 1):
            tier.rows.claim(row, 1, shape.context)

    def load(self) -> None:
        """Send the next step to the device."""
        length = self._shape.context + self._decoded + 1
        self._query.copy_(self._queries[STARTUP_QUERIES + self._decoded])
        self._indices.copy_(self._req_to_token[1:, length - 1])
        lengths = torch.full_like(self._rows, length)
        self._forward = self.engine.begin_decode(DecodeBatch(self._rows, torch.ones_like(self._rows), lengths))
        self._decoded += 1

    def run(self) -> None:
        hidden = self._hidden
        forward = self._forward
        self.engine.start(forward, self._indices)
        for layer, query in enumerate(self._query):
            key, value = self._model.key_value(layer, hidden)
            attended = self.engine.decode_layer(forward, layer, query, key, value, self._indices)
            hidden = self._model.after_attention(layer, hidden, attended)
        self._model.logits(hidden)
        self.engine.end()

    def load_without_predictions(self) -> None:
        self.load()
        for table in self.engine.tables:
            table.current.candidates.zero_()
            table.previous.candidates.zero_()

    def fetch_nothing(self) -> None:
        """Let later steps fetch nothing."""
        self.engine.pipeline._cap.zero_()

    def fetched(self) -> int:
        """Number of blocks that all steps so far have fetched."""
        return int(self.engine.pipeline.counters[1, 0])

    @property
    def steps(self) -> int:
        """Number of steps so far."""
        return self._decoded


def measure_dense(shape: Shape, model: Model, limits: Limits) -> dict[str, Any]:
    layout = lay_out(shape, 0, DEFAULT_FETCH_RATIO)[1]
    row_bytes = shape.layers * shape.kv_heads * layout.chunk_bytes * (shape.context // BLOCK)
    rows = min(limits.device_bytes // row_bytes, MOST_ROWS)
    if not rows:
        return {"rows": 0}
    step = DenseStep(replace(shape, batch=rows), model, limits.device)
    step.run()
    replay = captured(step.run, limits.device)
    for _ in range(3):
        replay()
    spread = steps_of(lambda: None, replay, STEPS // 2, limits.device)
    return {"rows": rows, "attention": step.attention, "step_ms": milliseconds(spread), **rate(rows, spread)}


def measure_lookahead(shape: Shape, model: Model, limits: Limits) -> dict[str, Any]:
    steps = WARM_UP + STEPS + 2 * WITHOUT
    layout = lay_out(shape, steps, DEFAULT_FETCH_RATIO)[1]
    rows = min(layout.rows_in(limits.device_bytes), MOST_ROWS)
    page_bytes, blocks = layout.host_page_bytes, shape.context // BLOCK
    tails = (1 + rows * (layout.max_blocks - blocks)) * page_bytes
    contexts = int(min(rows, max(1, (limits.host_bytes - tails) // (blocks * page_bytes))))
    shape = replace(shape, batch=rows)
    began = time.perf_counter()
    step = LookaheadStep(shape, model, limits, contexts, steps)
    built = time.perf_counter() - began
    step.load()
    step.run()
    replay = captured(step.run, limits.device)
    for _ in range(WARM_UP - 1):
        step.load()
        replay()
    before = step.fetched()
    spread = steps_of(step.load, replay, STEPS, limits.device)
    fetched = (step.fetched() - before) / STEPS
    step.fetch_nothing()
    unfetched = steps_of(step.load, replay, WITHOUT, limits.device)
    unpredicted = steps_of(step.load_without_predictions, replay, WITHOUT, limits.device)
    return {
        "rows": rows,
        "distinct_contexts": contexts,
        "attention": step.attention,
        "seconds_to_build": round(built, 2),
        "host_gb": round(step._host.nbytes / 1e9, 3),
        "step_ms": milliseconds(spread),
        **rate(rows, spread),
        "blocks_fetched_per_step": fetched,
        "blocks_per_row_head_and_layer": fetched / (rows * shape.kv_heads * shape.layers),
        "link_gb_per_step": fetched * layout.chunk_bytes / 1e9,
        "link_gb_per_second": fetched * layout.chunk_bytes / 1e9 / spread.median,
        "step_without_transfers_ms": milliseconds(unfetched),
        "step_without_predictions_ms": milliseconds(unpredicted),
        "exposed_transfer_ms": 1e3 * (spread.median - unfetched.median),
        "exposed_prediction_ms": 1e3 * (unfetched.median - unpredicted.median),
    }


def rate(rows: int, spread: Spread) -> dict[str, float]:
    return {"tokens_per_second": round(rows / spread.median, 1)}


def measure(shape: Shape, contexts: list[int], limits: Limits, seconds: float, say: Callable[[str], None]) -> Any:
    """Yield one record per context length, until the time is over."""
    began, model = time.perf_counter(), Model(shape, limits.device)
    for context in contexts:
        left = seconds - (time.perf_counter() - began)
        if left < SECONDS_PER_CONTEXT and limits.device.type == "cuda":
            yield {"context": context, "skipped": f"{left:.0f} s are left, and it may take {SECONDS_PER_CONTEXT} s"}
            continue
        sized, record = replace(shape, context=context), {"context": context}
        for name, measured in (("dense", measure_dense), ("lookahead", measure_lookahead)):
            try:
                record[name] = measured(sized, model, limits)
            except (torch.OutOfMemoryError, LookaheadKVError) as error:
                record[name] = {"error": str(error).splitlines()[0]}
            say(f"{context} tokens, {name}: {record[name]}")
            gc.collect()
            if limits.device.type == "cuda":
                torch.cuda.empty_cache()
        rates = [record[name].get("tokens_per_second") for name in ("lookahead", "dense")]
        record["throughput_ratio"] = round(rates[0] / rates[1], 3) if all(rates) else None
        yield record


def limits_of(device: torch.device, shape: Shape, device_gb: float, host_gb: float) -> Limits:
    """Return the requested limits, or less if the weights and a step leave less free memory."""
    if device.type != "cuda":
        return Limits(device, pageable, int(device_gb * 1e9), int(host_gb * 1e9))
    weights = 2 * shape.layers * shape.hidden * (3 * shape.mlp + 2 * shape.query_heads * shape.head_dim)
    weights += 2 * shape.hidden * (shape.vocabulary + 2 * shape.layers * shape.kv_heads * shape.head_dim)
    free = torch.cuda.mem_get_info(device)[0] - weights
    return Limits(
        device,
        pinned_allocator(device),
        int(min(device_gb * 1e9, 0.75 * free)),
        int(min(host_gb * 1e9, 0.4 * available_host_bytes())),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="sizes for a rehearsal; a CPU has no others")
    parser.add_argument("--contexts", type=int, nargs="+", help="tokens of each row")
    parser.add_argument("--device-gb", type=float, default=40, help="device memory for KV, for each of the two")
    parser.add_argument("--host-gb", type=float, default=24, help="pinned memory, 48 at most")
    parser.add_argument("--seconds", type=float, default=120, help="time limit of the benchmark")
    parser.add_argument("--json", type=report_file, help="write the records to this file")
    options = parser.parse_args()
    tiny = options.tiny or options.device == "cpu"
    device = torch.device(options.device, 0) if options.device == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        from sglang_oasis.kernels.cuda import overrides

        overrides.install()
    shape, contexts = (TINY, [512]) if tiny else (QWEN3_8B, [32768, 16384])
    device_gb, host_gb = (0.0004, 0.001) if tiny else (options.device_gb, min(options.host_gb, 48))
    limits = limits_of(device, shape, device_gb, host_gb)
    torch.manual_seed(0)
    records = []
    with torch.inference_mode():
        for record in measure(shape, options.contexts or contexts, limits, options.seconds, print):
            records.append(record)
            if options.json is not None:
                sizes = {"device_gb": limits.device_bytes / 1e9, "host_gb": limits.host_bytes / 1e9}
                options.json.write_text(json.dumps({**sizes, "contexts": records}, indent=1) + "\n")


if __name__ == "__main__":
    main()
