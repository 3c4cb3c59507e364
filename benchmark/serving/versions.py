"""Two versions of the product, in turns: is this checkout as fast as another one?

    git worktree add ../before <commit>
    python -m benchmark.serving.versions ../before

Both serve at the same time and sleep while the other one is asked. Each turn asks both for the same things; factors are
medians of the ratios within a turn, this checkout over the other one, with their quartiles.

- `start`: seconds until a server generates, imports included.
- `prefill`: seconds to the first token of a prompt that no cache knows.
- `cached prefill`: the same, of the last of these prompts and a few new tokens.
- `decode`: seconds per token of one request past its budget, prefill not counted.
- `serving`: seconds for a burst of prompts that no cache knows, with their answers.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmark import report
from benchmark.serving.turns import Texts, compared, seconds_to_answer
from sglang_oasis.testing.server import launch_server

HERE = Path(__file__).resolve().parents[2]
NEW_TOKENS = 16


def environment(checkout: Path) -> dict[str, str]:
    """Variables with which a server runs the package of that checkout.

    Raises:
        SystemExit: there is none.
    """
    env = {"PYTHONPATH": str(checkout / "python")}
    where = [sys.executable, "-c", "import sglang_oasis; print(sglang_oasis.__file__)"]
    found = subprocess.run(where, env=os.environ | env, cwd=checkout, capture_output=True, text=True, check=False)
    if not found.stdout.startswith(env["PYTHONPATH"]):
        raise SystemExit(f"{checkout} must be a checkout of this project, got {found.stdout or found.stderr}")
    return env


def flags(options: argparse.Namespace) -> tuple[str, ...]:
    requests, tokens = options.burst, options.prompt + options.output + NEW_TOKENS
    return (
        *("--enable-lookahead-kv", "--lookahead-kv-budget-tokens", str(options.budget), "--dtype", options.dtype),
        *("--context-length", str(tokens + 64), "--max-running-requests", str(requests)),
        *("--max-total-tokens", str((requests + 4) * tokens), "--page-size", "16", "--chunked-prefill-size", "2048"),
    )


def seconds_to_start(env: dict[str, str], options: argparse.Namespace) -> float:
    start = time.perf_counter()
    with launch_server(*flags(options), env=env, ordinary=True):
        return time.perf_counter() - start


def measure(envs: dict[str, dict[str, str]], options: argparse.Namespace) -> dict[str, Any]:
    def in_turns(turns: int, what: str, way: Callable[[str], float]) -> dict[str, Any]:
        return compared(turns, {name: lambda name=name: way(name) for name in envs}, what)

    found = {"start": in_turns(options.starts, "start", lambda name: seconds_to_start(envs[name], options))}
    with contextlib.ExitStack() as stack:
        servers = {
            name: stack.enter_context(launch_server(*flags(options), env=env, ordinary=True))
            for name, env in envs.items()
        }
        tokens = options.turns * ((options.burst + 2) * options.prompt + NEW_TOKENS)
        texts = {name: Texts(tokens) for name in envs}
        last: dict[str, list[int]] = {}

        def prefill(name: str) -> float:
            last[name] = texts[name].take(options.prompt)
            return seconds_to_answer(servers[name], last[name], 1)

        def cached(name: str) -> float:
            return seconds_to_answer(servers[name], last[name] + texts[name].take(NEW_TOKENS), 1)

        def decode(name: str) -> float:
            prompt = texts[name].take(options.prompt)
            seconds_to_answer(servers[name], prompt, 1)
            first, whole = (seconds_to_answer(servers[name], prompt, tokens) for tokens in (1, options.output))
            return (whole - first) / (options.output - 1)

        def burst(name: str) -> float:
            prompts = [texts[name].take(options.prompt) for _ in range(options.burst)]
            start = time.perf_counter()
            with ThreadPoolExecutor(options.burst) as clients:
                list(clients.map(lambda prompt: seconds_to_answer(servers[name], prompt, options.output), prompts))
            return time.perf_counter() - start

        for server in servers.values():  # what happens once, happens now
            seconds_to_answer(server, [7] * options.prompt, 8)
        for what, way in {"prefill": prefill, "cached prefill": cached, "decode": decode, "serving": burst}.items():
            found[what] = in_turns(options.turns, what, way)
    return found


def quartiles(found: dict[str, Any]) -> Sequence[float]:
    """Of the ratios within a turn, this checkout over the other one."""
    before, here = (way["samples"] for way in found.values())
    return statistics.quantiles([mine / base for mine, base in zip(here, before, strict=True)], method="inclusive")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path, help="another checkout of this project")
    parser.add_argument("--turns", type=int, default=11)
    parser.add_argument("--starts", type=int, default=5)
    parser.add_argument("--prompt", type=int, default=1600, help="tokens")
    parser.add_argument("--output", type=int, default=64, help="tokens")
    parser.add_argument("--burst", type=int, default=4, help="requests")
    parser.add_argument("--budget", type=int, default=1024)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--name", default="versions")
    options = parser.parse_args()
    before = options.before.resolve()
    found = measure({"before": environment(before), "here": environment(HERE)}, options)
    rows = [
        (what, *(f"{way['seconds']:.3f}" for way in ways.values()), *(f"{ratio:.3f}" for ratio in quartiles(ways)))
        for what, ways in found.items()
    ]
    report.show_table("Two versions", ("", "before, s", "here, s", "ratio, lower", "median", "upper"), rows)
    report.save(options.name, {"options": vars(options) | {"before": report.commit_of(before)}, **found})


if __name__ == "__main__":
    main()
