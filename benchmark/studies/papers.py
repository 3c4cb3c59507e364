"""The worked numbers of OasisKV (arXiv 2608.08097), recomputed.

    python -m benchmark.studies.papers [--output-json FILE]

Only the values in this file come from the paper: the settings that it names, and the figures to compare with.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from sglang_oasis.config import LookaheadKVConfig
from sglang_oasis.planner.capacity import Deployment, capacity_of, default_memory_fraction, dense_batch
from sglang_oasis.planner.hardware import GPUS
from sglang_oasis.planner.models import model_of
from sglang_oasis.planner.roofline import step_bytes_budget
from sglang_oasis.planner.sweep import SweepPoint, fetch_cap_sweep

OASIS_FLAGS = {
    "lookahead_kv_recent_tokens": 0,
    "lookahead_kv_sink_tokens": 0,
    "lookahead_kv_smoothing": 0.0,
    "lookahead_kv_summary_dtype": "bf16",
}
"""Section 5.1: 128 selected blocks of 16 tokens and the open one, two bfloat16 vectors a summary."""

ABLATION_BATCH = 128
"""Requests of Table 2, inferred. At ratio 0.01 C is one block, of 2.36 MB in Qwen3-8B's 36 layers and 8 KV heads, and a
step moves 0.30 GB; and 824 tokens/s with 5.05 GB a step at 30 to 34 GB/s take 122 to 139 requests."""
ABLATION_CONTEXT = 8192
"""Assumed mean length of an AIME24 request; only the scan of the summaries depends on it."""
ABLATION_RATIOS = (0.01, 0.02, 0.03, 0.05, 0.1, 0.2, 1.0)
DRIFT = 5.05 / 0.30
"""Blocks per KV head and step that are fetched without a cap: Table 2's two ends, the first of which is one block."""
TOKENS_PER_ROW = 2
"""Tokens per request and step: the newest token and the draft."""
PAPER_STEP_SECONDS = ABLATION_BATCH / 2178
"""Seconds of a step that never waits: Table 2, ratio 0.01."""


class Worked(NamedTuple):
    """One number of the paper.

    Attributes:
        name: what it is.
        source: place in the paper.
        published: least and largest value in the paper.
        recomputed: value of the planner.
        unit: unit of both values.
    """

    name: str
    source: str
    published: tuple[float, float]
    recomputed: float
    unit: str


def worked_numbers() -> list[Worked]:
    """Return all numbers except those of the ablation."""
    token = model_of("Qwen3-32B").kv_token_bytes
    link = step_bytes_budget(GPUS["h100"].link_bytes_per_second, 0.017)
    per_request = link / 64 / model_of("Qwen3-8B").kv_token_bytes
    h100 = oasis_deployment(16_384)
    capacity = capacity_of(h100)
    with_draft = h100.layout.rows_in(h100.kv_bytes - h100.staging_bytes, draft_kv_bytes(h100))
    return [
        Worked("KV of a 32.7K-token request, 32B GQA", "Eq. 1", (8.6, 8.6), 32_768 * token / 1e9, "GB"),
        Worked("such requests in 80 GB", "Eq. 2", (9, 9), dense_batch(80 * 10**9, 32_768, token), ""),
        Worked("hidden per request and step, 64 requests", "Eq. 3", (118, 118), per_request, "tokens"),
        Worked("dense requests at 16K, Qwen3-8B", "Fig. 11", (22, 22), capacity.dense, ""),
        Worked("sparse requests at 16K, no draft model", "Fig. 11", (90, 95), capacity.lookahead, ""),
        Worked("the same with the draft's KV", "Fig. 11", (90, 95), with_draft, ""),
        Worked("host requests at 100K, Qwen3-235B, 1 TB", "challenge 3", (26, 26), staged_requests(), ""),
    ]  # fmt: skip


def oasis_deployment(context: int) -> Deployment:
    """Return Qwen3-8B on one H100, with the paper's working set in our tiers."""
    gpu = GPUS["h100"]
    config = LookaheadKVConfig.from_flags(OASIS_FLAGS)
    return Deployment(model_of("Qwen3-8B"), gpu, config, context, 1, None, default_memory_fraction(gpu, 1))


def draft_kv_bytes(deployment: Deployment) -> int:
    """Return the KV bytes of one request in an EAGLE-3 head with one layer, which the paper keeps on the GPU."""
    return deployment.context * deployment.kv_token_bytes // deployment.model.layers


def staged_requests() -> float:
    """Return how many requests of 100,000 tokens fit into 10^12 bytes; eight ranks hold each of 4 KV heads twice."""
    model = model_of("Qwen3-235B-A22B")
    token = model.kv_token_bytes / model.kv_heads * 8 * model.kv_heads_of_rank(8)
    return 1e12 / (100_000 * token)


def ablation(*, papers_step: bool) -> list[SweepPoint]:
    """Simulate Table 2.

    Args:
        papers_step: True to take the paper's measured time of a step that never waits, False for the roofline's.
    """
    return fetch_cap_sweep(
        oasis_deployment(ABLATION_CONTEXT),
        ABLATION_BATCH,
        ratios=ABLATION_RATIOS,
        drift=DRIFT,
        tokens_per_row=TOKENS_PER_ROW,
        device_seconds=PAPER_STEP_SECONDS if papers_step else None,
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Print all numbers."""
    import rich
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output-json", type=Path, metavar="FILE", help="write all numbers to this file")
    file = parser.parse_args(arguments).output_json
    numbers = worked_numbers()
    sweeps = {"hardware alone": ablation(papers_step=False), "the paper's unhindered step": ablation(papers_step=True)}
    table = Table("", "paper", "recomputed", "unit", "source", box=SIMPLE_HEAD)
    for number in numbers:
        published = "-".join(f"{each:g}" for each in dict.fromkeys(number.published))
        table.add_row(number.name, published, f"{number.recomputed:.4g}", number.unit, number.source)
    rich.print(table)
    for title, points in sweeps.items():
        table = Table("ratio", "blocks", "GB/step", "link GB/s", "step ms", "tokens/s", title=title, box=SIMPLE_HEAD)
        for point in points:
            values = (point.fetch_bytes / 1e9, point.link_bytes_per_second / 1e9, point.step_seconds * 1e3)
            cells = (f"{point.ratio:g}", str(point.cap), *(f"{value:.2f}" for value in values))
            table.add_row(*cells, f"{point.tokens_per_second:.0f}")
        rich.print(table)
    if file is not None:
        record = {
            "numbers": [number._asdict() for number in numbers],
            "ablation": {title: [point._asdict() for point in points] for title, points in sweeps.items()},
        }
        file.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
