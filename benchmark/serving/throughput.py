"""Measures serving with SGLang's load generator: stock SGLang (torch_native), the dense backend and lookahead KV.

    python -m benchmark.serving.throughput

All get the same requests, but stock SGLang only the first few, because each takes minutes there. Two workloads of
`sglang.bench_serving`: `custom` (distinct windows of a real text) and `generated-shared-prefix`.
"Same bytes" means the device KV bytes that hold the full KV cache of R requests of the longest length: as the KV pool
of stock SGLang and of the dense backend, as the resident tier (blocks, maps, summaries) of lookahead KV. The dense
backend also runs with as many bytes as all requests need.

Decode throughput is the number of requests that decode concurrently divided by the time between two tokens of one of
them, as the median over all tokens, so that prefill, which interrupts decoding, has little effect. The output
throughput of the whole run and the times to first token, which include prefill, are reported, too.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from matplotlib.figure import Figure
from transformers import AutoConfig, AutoTokenizer

from benchmark import report
from benchmark.serving.token_times import decoding
from sglang_oasis.reference_model import reference_model_path
from sglang_oasis.testing.corpus import real_text_tokens
from sglang_oasis.testing.server import Server, launch_server

PAGE = 16
BYTES_PER_ELEMENT = 2  # bfloat16
WINDOW_DISTANCE = 1997
WORKLOADS = ("custom", "generated-shared-prefix")


@dataclass(frozen=True)
class Run:
    """One workload on one server.

    Attributes:
        server, workload: names of the server and of the workload.
        requests: number of requests, all sent at the same time.
        running: requests that decoded concurrently, median over the tokens.
        decode_throughput: tokens per second of all decoding requests, median over the tokens.
        output_throughput: tokens per second of the whole run.
        median_itl_ms: milliseconds between two tokens of a request.
        median_ttft_ms: milliseconds to the first token.
    """

    server: str
    workload: str
    requests: int
    running: float
    decode_throughput: float
    output_throughput: float
    median_itl_ms: float
    median_ttft_ms: float


def kv_bytes_per_token() -> int:
    config = AutoConfig.from_pretrained(reference_model_path())
    head_dim = config.hidden_size // config.num_attention_heads
    return 2 * config.num_hidden_layers * config.num_key_value_heads * head_dim * BYTES_PER_ELEMENT


def pool_tokens(requests: int, options: argparse.Namespace) -> int:
    """Return the KV tokens of `requests` longest requests; SGLang admits one only if a page or two remain free."""
    pages = -(-(options.longest + options.output) // PAGE) + 2
    return requests * pages * PAGE


def servers(options: argparse.Namespace) -> dict[str, tuple[str, ...]]:
    """Return the flags of each server by name."""
    same_bytes = pool_tokens(options.dense_requests, options)
    everything = str(pool_tokens(options.requests, options))
    common = (
        *(
            "--dtype",
            options.dtype,
            "--kv-cache-dtype",
            "bfloat16",
            "--context-length",
            str(options.longest + options.output + 2 * PAGE),
        ),
        *("--page-size", str(PAGE), "--chunked-prefill-size", "2048"),
    )
    gigabytes = same_bytes * kv_bytes_per_token() / 1e9
    return {
        "stock, same bytes": (*common, "--attention-backend", "torch_native", "--max-total-tokens", str(same_bytes)),
        "dense, same bytes": (*common, "--attention-backend", "oasis_cpu", "--max-total-tokens", str(same_bytes)),
        "dense, unlimited": (*common, "--attention-backend", "oasis_cpu", "--max-total-tokens", everything),
        "lookahead, same bytes": (
            *(*common, "--enable-lookahead-kv", "--lookahead-kv-budget-tokens", str(options.budget)),
            *("--lookahead-kv-device-gb", f"{gigabytes:.6f}", "--max-total-tokens", everything),
            *("--max-running-requests", str(options.requests)),
        ),
    }


def write_dataset(file: Path, options: argparse.Namespace) -> None:
    """Write conversations whose first turn is a window of the text, `shortest` to `longest` tokens long."""
    tokenizer = AutoTokenizer.from_pretrained(reference_model_path())
    text = real_text_tokens(tokenizer, options.requests * WINDOW_DISTANCE + options.longest)
    step = (options.longest - options.shortest) / max(1, options.requests - 1)
    with file.open("w") as lines:
        for i in range(options.requests):
            # A few tokens less: text that is cut inside a word may become more tokens when it is tokenized again.
            length = int(options.shortest + i * step) - 8
            prompt = tokenizer.decode(text[i * WINDOW_DISTANCE : i * WINDOW_DISTANCE + length])
            turns = [{"content": prompt}, {"content": "Yes."}]
            lines.write(json.dumps({"conversations": turns}) + "\n")


def bench(server: Server, name: str, workload: str, requests: int, dataset: Path, options: argparse.Namespace) -> Run:
    """Run `sglang.bench_serving` once, on an empty prefix cache."""
    host, port = server.url.removeprefix("http://").split(":")
    shared = (
        *("--gsp-num-groups", str(max(1, requests // 4)), "--gsp-prompts-per-group", str(min(4, requests))),
        *("--gsp-system-prompt-len", str(options.shortest - 256), "--gsp-question-len", "128"),
    )
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "result.jsonl"
        command = [
            *(sys.executable, "-m", "sglang.bench_serving", "--backend", "sglang", "--host", host, "--port", port),
            *("--model", str(reference_model_path()), "--dataset-name", workload, "--num-prompts", str(requests)),
            *("--output-file", str(output), "--output-details", "--flush-cache", "--seed", "1"),
            *("--dataset-path", str(dataset), "--sharegpt-output-len", str(options.output)),
            *(*shared, "--gsp-output-len", str(options.output)),
        ]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
        if done.returncode != 0:
            raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}: {done.stdout[-2000:]}")
        result = json.loads(output.read_text().splitlines()[-1])
    running, throughput = decoding(result["ttfts"], result["itls"])
    return Run(
        server=name,
        workload=workload,
        requests=requests,
        running=running,
        decode_throughput=throughput,
        output_throughput=result["output_throughput"],
        median_itl_ms=result["median_itl_ms"],
        median_ttft_ms=result["median_ttft_ms"],
    )


def show(runs: Sequence[Run]) -> None:
    report.show_table(
        "Serving",
        ("server", "workload", "requests", "running", "decode tok/s", "output tok/s", "ITL ms", "TTFT s"),
        [
            (
                *(r.server, r.workload, str(r.requests), f"{r.running:.0f}", f"{r.decode_throughput:.1f}"),
                *(f"{r.output_throughput:.1f}", f"{r.median_itl_ms:.1f}", f"{r.median_ttft_ms / 1e3:.1f}"),
            )
            for r in runs
        ],
    )


def plot(runs: Sequence[Run]) -> Figure:
    figure = Figure(figsize=(9, 0.5 * len(runs) + 1.5))
    axes = figure.subplots()
    axes.barh([f"{r.server}\n{r.workload}" for r in runs], [r.decode_throughput for r in runs])
    axes.invert_yaxis()
    axes.set(xlabel="decode throughput, tokens per second")
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--servers", nargs="+", help="some of the servers, by name")
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=WORKLOADS)
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--stock-requests", type=int, default=4, help="requests for stock SGLang (minutes each)")
    parser.add_argument("--dense-requests", type=int, default=4, help="R, requests whose full KV the device bytes hold")
    parser.add_argument("--shortest", type=int, default=6000)
    parser.add_argument("--longest", type=int, default=7000)
    parser.add_argument("--output", type=int, default=96, help="output tokens of each request")
    parser.add_argument("--budget", type=int, default=1024)
    parser.add_argument("--dtype", default="bfloat16", help="dtype of the computation, or auto; K and V are bfloat16")
    parser.add_argument("--name", default="serving")
    options = parser.parse_args()
    chosen = {name: flags for name, flags in servers(options).items() if name in (options.servers or servers(options))}
    runs = []
    with tempfile.TemporaryDirectory() as folder:
        dataset = Path(folder) / "conversations.jsonl"
        write_dataset(dataset, options)
        for name, flags in report.progress(list(chosen.items()), "servers"):
            requests = options.stock_requests if name.startswith("stock") else options.requests
            with launch_server(*flags) as server:
                for workload in options.workloads:
                    runs.append(bench(server, name, workload, requests, dataset, options))
    show(runs)
    report.save(options.name, {"options": vars(options), "runs": [asdict(run) for run in runs]}, plot(runs))


if __name__ == "__main__":
    main()
