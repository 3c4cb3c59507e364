"""Measures prefill of cold prompts, and of a few new tokens on a cached prefix.

    python -m benchmark.serving.prefill

Prompts are windows of a real text without common prefixes. Each is sent once cold, and again with other last tokens, so
that its prefix comes from the prefix cache; one output token is generated, so the time of a request is its time to
first token.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from matplotlib.figure import Figure
from transformers import AutoTokenizer

from benchmark import report
from sglang_oasis.reference_model import reference_model_path
from sglang_oasis.testing.corpus import real_text_tokens
from sglang_oasis.testing.server import Server, launch_server

BACKENDS = {
    "stock": ("--attention-backend", "torch_native"),
    "dense": ("--attention-backend", "oasis_cpu"),
    "lookahead": ("--enable-lookahead-kv", "--lookahead-kv-budget-tokens", "1024"),
}
WINDOW_DISTANCE = 1997


@dataclass(frozen=True)
class Result:
    """Results of one backend, medians over the prompts.

    Attributes:
        backend: name.
        cold: seconds to the first token of a prompt without a cached prefix.
        cached: seconds to the first token of a prompt with a cached prefix.
        tokens_per_second: rate of cold prefill.
    """

    backend: str
    cold: float
    cached: float
    tokens_per_second: float


def time_to_first_token(server: Server, prompt: Sequence[int], cached: int) -> float:
    """Return the seconds to the first token, after a check that `cached` tokens came from the prefix cache."""
    start = time.perf_counter()
    answer = server.generate(list(prompt), max_new_tokens=1)
    taken = time.perf_counter() - start
    found = answer["meta_info"]["cached_tokens"]
    if found != cached:
        raise RuntimeError(f"{cached} tokens must come from the prefix cache, got {found}")
    return taken


def measure(backend: str, text: Sequence[int], options: argparse.Namespace) -> Result:
    tokens = str((options.prefix + options.new + 64) * options.prompts)
    flags = (
        "--dtype",
        options.dtype,
        "--kv-cache-dtype",
        "bfloat16",
        "--page-size",
        "16",
        "--chunked-prefill-size",
        "8192",
        "--max-total-tokens",
        tokens,
    )
    cold, cached = [], []
    with launch_server(*flags, *BACKENDS[backend]) as server:
        server.generate(list(text[-options.prefix :]), max_new_tokens=1)  # warm-up, not counted
        server.post("/flush_cache").raise_for_status()
        for i in report.progress(range(options.prompts), backend):
            prompt = list(text[i * WINDOW_DISTANCE :][: options.prefix + options.new])
            cold.append(time_to_first_token(server, prompt, 0))
            changed = [*prompt[: options.prefix], *reversed(prompt[options.prefix :])]
            cached.append(time_to_first_token(server, changed, options.prefix))
    median = statistics.median(cold)
    return Result(backend, median, statistics.median(cached), (options.prefix + options.new) / median)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backends", nargs="+", choices=BACKENDS, default=list(BACKENDS))
    parser.add_argument("--prefix", type=int, default=3904, help="tokens that are cached the second time, whole pages")
    parser.add_argument("--new", type=int, default=16, help="tokens that are not cached")
    parser.add_argument("--prompts", type=int, default=5)
    parser.add_argument("--dtype", default="bfloat16", help="dtype of the computation, or auto; K and V are bfloat16")
    parser.add_argument("--name", default="prefill")
    options = parser.parse_args()
    needed = options.prompts * WINDOW_DISTANCE + 2 * (options.prefix + options.new)
    text = real_text_tokens(AutoTokenizer.from_pretrained(reference_model_path()), needed)
    results = [measure(backend, text, options) for backend in options.backends]
    report.show_table(
        f"Prefill of {options.prefix + options.new} tokens, and of {options.new} on {options.prefix} cached ones",
        ("backend", "cold s", "tok/s", "cached s", "cold / cached"),
        [
            (r.backend, f"{r.cold:.2f}", f"{r.tokens_per_second:.0f}", f"{r.cached:.3f}", f"{r.cold / r.cached:.1f}")
            for r in results
        ],
    )
    figure = Figure(figsize=(6, 3))
    axes = figure.subplots()
    bars = {f"{r.backend}, {kind}": getattr(r, kind) for r in results for kind in ("cold", "cached")}
    axes.bar(list(bars), list(bars.values()))
    axes.set(ylabel="time to first token, s", yscale="log")
    axes.tick_params(axis="x", rotation=30)
    report.save(options.name, {"options": vars(options), "results": [asdict(r) for r in results]}, figure)


if __name__ == "__main__":
    main()
