"""Measures how many long requests decode concurrently in the same device KV bytes: stock SGLang and lookahead KV.

    python -m benchmark.serving.capacity                 # the whole reference model
    python -m benchmark.serving.capacity --layers 4      # its first four layers: the same ratio, much faster

The device budget is the size of the full KV cache of R requests. Stock SGLang gets it as its KV pool; lookahead KV gets
it for resident blocks, head maps and summaries. Distinct prompts are sent at the same time; the figure is the largest
`sglang:num_running_reqs` that SGLang's own metrics report. Stock SGLang is sent two requests more than fit, which is
enough to see that they wait: its CPU attention takes up to a minute for each.
"""

from __future__ import annotations

import argparse
import json
import re
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path

import rich
from rich.table import Table
from tqdm import tqdm
from transformers import AutoConfig, AutoTokenizer

from sglang_oasis.reference_model import reference_model_path, truncated_model_path
from sglang_oasis.testing.corpus import real_text_tokens
from sglang_oasis.testing.server import Server, launch_server

RESULTS = Path(__file__).parents[1] / "results"
BYTES_PER_ELEMENT = 2  # of K and V in bfloat16, whatever the computation is in
PAGE = 16


@dataclass(frozen=True)
class Workload:
    """One comparison.

    Attributes:
        layers: layers of the model, None for all.
        dense_requests: R, requests whose full KV the device budget holds.
        prompt_tokens, output_tokens: of every request.
        clients: requests sent at the same time to lookahead KV.
        budget_tokens: selected tokens per KV head and layer of lookahead KV.
    """

    layers: int | None = None
    dense_requests: int = 4
    prompt_tokens: int = 6000
    output_tokens: int = 32
    clients: int = 20
    budget_tokens: int = 768

    @property
    def pool_tokens(self) -> int:
        """Tokens of KV in the device budget; SGLang admits a request only if a page or two remain free."""
        pages = -(-(self.prompt_tokens + self.output_tokens) // PAGE) + 2
        return self.dense_requests * pages * PAGE

    @property
    def model(self) -> Path:
        return reference_model_path() if self.layers is None else truncated_model_path(self.layers)

    @property
    def device_bytes(self) -> int:
        config = AutoConfig.from_pretrained(self.model)
        token = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * BYTES_PER_ELEMENT
        return self.pool_tokens * token


@dataclass(frozen=True)
class Outcome:
    """The result of a server.

    Attributes:
        clients: requests sent at the same time.
        running: most requests that ran concurrently, by SGLang's own metric.
        finished: requests that produced all their tokens.
        device_bytes: device KV bytes it was given.
    """

    clients: int
    running: int
    finished: int
    device_bytes: int


def running_requests(server: Server) -> int:
    """Return SGLang's metric `sglang:num_running_reqs`."""
    values = re.findall(r"^sglang:num_running_reqs\{[^}]*\} (\S+)$", server.get("/metrics").text, re.MULTILINE)
    return int(max(map(float, values), default=0))


def prompts(workload: Workload) -> list[list[int]]:
    """Return distinct prompts of real text, of which no two share a page."""
    corpus = real_text_tokens(
        AutoTokenizer.from_pretrained(workload.model), workload.prompt_tokens + 64 * workload.clients
    )
    return [corpus[64 * i : 64 * i + workload.prompt_tokens] for i in range(workload.clients)]


def drive(server: Server, workload: Workload, clients: int, title: str) -> tuple[int, int]:
    """Send the first `clients` requests at the same time; return (most running, finished)."""
    done = threading.Event()
    most = 0

    def watch() -> None:
        nonlocal most
        while not done.wait(0.1):
            most = max(most, running_requests(server))

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        with ThreadPoolExecutor(clients) as pool:
            requests = [
                pool.submit(server.generate, p, max_new_tokens=workload.output_tokens, sampling={"ignore_eos": True})
                for p in prompts(workload)[:clients]
            ]
            finished = 0
            for request in tqdm(as_completed(requests), total=len(requests), desc=title, unit="request"):
                finished += len(request.result()["output_ids"]) == workload.output_tokens
    finally:
        done.set()
        watcher.join()
    return most, finished


def measure(workload: Workload) -> dict[str, Outcome]:
    """Run the workload on stock SGLang, then on lookahead KV."""
    common = (
        *("--dtype", "auto", "--context-length", str(workload.prompt_tokens + 400)),
        *("--chunked-prefill-size", "8192", "--enable-metrics", "--decode-log-interval", "1"),
    )
    variants: dict[str, tuple[str, ...]] = {
        "stock": ("--max-total-tokens", str(workload.pool_tokens)),
        "lookahead": (
            *("--enable-lookahead-kv", "--lookahead-kv-budget-tokens", str(workload.budget_tokens)),
            *("--lookahead-kv-device-gb", str(workload.device_bytes / 1e9)),
            *("--max-total-tokens", str(workload.clients * (workload.prompt_tokens + 400))),
        ),
    }
    outcomes = {}
    for name, flags in variants.items():
        with launch_server(*common, *flags, model=workload.model) as server:
            clients = workload.clients if name == "lookahead" else workload.dense_requests + 2
            running, finished = drive(server, workload, clients, name)
            given = server.stats()["bytes"]["device_capacity"] if name == "lookahead" else workload.device_bytes
            outcomes[name] = Outcome(clients, running, finished, given)
    return outcomes


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, help="layers of the reference model to keep (default: all)")
    workload = Workload(layers=parser.parse_args(arguments).layers)
    outcomes = measure(workload)

    table = Table(title=f"Requests of {workload.prompt_tokens} tokens, budget {workload.budget_tokens}")
    for column in ("server", "device KV bytes", "sent", "running concurrently", "finished"):
        table.add_column(column, justify="right")
    for name, outcome in outcomes.items():
        table.add_row(
            name,
            f"{outcome.device_bytes / 1e6:.1f} MB",
            str(outcome.clients),
            str(outcome.running),
            str(outcome.finished),
        )
    rich.print(table)
    ratio = outcomes["lookahead"].running / outcomes["stock"].running
    rich.print(f"lookahead KV runs {ratio:.1f} times as many requests in the same device bytes")

    RESULTS.mkdir(exist_ok=True)
    name = "capacity.json" if workload.layers is None else f"capacity_{workload.layers}_layers.json"
    record = {"workload": asdict(workload), "outcomes": {k: asdict(v) for k, v in outcomes.items()}, "ratio": ratio}
    (RESULTS / name).write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
