"""Times the CPU kernels beside torch's own attention, in one process: test_cpu_kernel_speed.py runs it.

    python -m test.cases.kernel_speed

One thread, its CPU time, the least of several runs that take turns: another program on the core changes little.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable

import torch

from sglang_oasis.kernels.cpu import native
from sglang_oasis.kernels.cpu import overrides as _overrides  # noqa: F401  (importing it puts the kernels in the references' place)
from sglang_oasis.ops.attention import paged_attention
from sglang_oasis.ops.summary import SUMMARY_FORMATS, block_scores, summarise, summarise_pages

KV_HEADS, GROUP, HEAD_DIM, BLOCK = 3, 3, 64, 16
TURNS = 7
torch_attention = torch.nn.functional.scaled_dot_product_attention


def times_faster(ours: Callable[[], object], theirs: Callable[[], object]) -> float:
    least = {ours: float("inf"), theirs: float("inf")}
    for turn in range(TURNS + 1):
        for run in least:
            start = time.thread_time()
            run()
            if turn > 0:
                least[run] = min(least[run], time.thread_time() - start)
    return least[theirs] / least[ours]


def attention(sequences: int, prefix: int, new: int, stored: torch.dtype) -> float:
    """float32 queries; torch gets K and V of each query head, in float32 and side by side."""
    length, heads = prefix + new, KV_HEADS * GROUP
    blocks = -(-length // BLOCK)
    query = torch.randn(sequences * new, heads, HEAD_DIM)
    pool = torch.randn(sequences * blocks, KV_HEADS, 2, BLOCK, HEAD_DIM).to(stored)
    arguments = (
        torch.zeros(sequences, dtype=torch.int64),
        torch.arange(sequences * blocks, dtype=torch.int32).view(sequences, blocks),
        torch.full((sequences,), length, dtype=torch.int32),
        torch.arange(sequences + 1, dtype=torch.int32) * new,
        HEAD_DIM**-0.5,
    )
    dense_query = query.view(sequences, new, heads, HEAD_DIM).transpose(1, 2).contiguous()
    keys, values = torch.randn(2, sequences, heads, length, HEAD_DIM)
    causal = new > 1
    return times_faster(
        lambda: paged_attention(query, pool, *arguments),
        lambda: torch_attention(dense_query, keys, values, is_causal=causal),
    )


def scores(fmt: str) -> float:
    """Of 64 blocks, beside a decode attention of torch to what they summarise."""
    records = summarise(torch.randn(1, KV_HEADS, 64, BLOCK, HEAD_DIM), SUMMARY_FORMATS[fmt])
    query = torch.randn(1, 1, KV_HEADS * GROUP, HEAD_DIM)
    candidates = torch.tensor([64])
    keys, values = torch.randn(2, 1, KV_HEADS * GROUP, 64 * BLOCK, HEAD_DIM)
    return times_faster(
        lambda: block_scores(query, records, SUMMARY_FORMATS[fmt], candidates, 0.1, 0.6),
        lambda: torch_attention(query.transpose(1, 2), keys, values),
    )


def summaries(fmt: str) -> float:
    """Of 64 blocks, beside the same attention."""
    host = torch.randn(64, KV_HEADS, 2, BLOCK, HEAD_DIM).bfloat16()
    records = torch.empty(64, KV_HEADS, SUMMARY_FORMATS[fmt].record_bytes(HEAD_DIM), dtype=torch.uint8)
    query = torch.randn(1, KV_HEADS * GROUP, 1, HEAD_DIM)
    keys, values = torch.randn(2, 1, KV_HEADS * GROUP, 64 * BLOCK, HEAD_DIM)
    return times_faster(
        lambda: summarise_pages(host, torch.arange(64), SUMMARY_FORMATS[fmt], records),
        lambda: torch_attention(query, keys, values),
    )


def main() -> None:
    kernels = native.load()
    torch.set_num_threads(1)
    kernels.configure_threads(1, torch.tensor([], dtype=torch.int64))
    ratios = {}
    for stored in (torch.float32, torch.bfloat16, torch.float16):
        ratios[f"prefill, {stored}"] = attention(1, 0, 512, stored)
        ratios[f"decode, {stored}"] = attention(4, 1023, 1, stored)
    for fmt in ("int4", "int8", "bf16"):
        ratios[f"scores, {fmt}"] = scores(fmt)
        ratios[f"summaries, {fmt}"] = summaries(fmt)
    print(json.dumps({"instruction_set": kernels.instruction_set(), "ratios": ratios}))


if __name__ == "__main__":
    main()
