"""Measures the CPU time of an idle server, and its effects on the next request and on another server.

    python -m benchmark.serving.idle

Servers sleep when idle, the default on a CPU, or poll (`--sleep-on-idle false`). All run at the same time and take
turns, so that a slow minute of the machine slows them all; servers that wait for their turn are stopped (SIGSTOP).
Figures are medians, factors medians of ratios within one turn.

- CPU time of all processes of an idle server, as a share of one core, with text in its prefix cache and metrics on.
- Seconds to the answer of a short request after five idle seconds, from a server that sleeps and from one that polls.
- Seconds to the answer of a longer request, from a server alone, beside one that sleeps, and beside one that polls.
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

from benchmark import report
from benchmark.serving.turns import Texts, compared, seconds_to_answer
from sglang_oasis.reference_model import truncated_model_path
from sglang_oasis.testing.idle import idle_share, processes
from sglang_oasis.testing.server import Server, launch_server

LOOKAHEAD = (
    *("--enable-lookahead-kv", "--lookahead-kv-budget-tokens", "512"),
    *("--lookahead-kv-host-gb", "0.4", "--lookahead-kv-device-gb", "0.4"),
)
DENSE = ("--attention-backend", "oasis_cpu", "--max-total-tokens", "16384")
COMMON = ("--context-length", "2048", "--max-running-requests", "4", "--enable-metrics")
POLLS = ("--sleep-on-idle", "false")
VARIANTS: dict[str, tuple[str, ...]] = {
    "lookahead": LOOKAHEAD,
    "dense": DENSE,
    "lookahead, polls": (*LOOKAHEAD, *POLLS),
}
SLEEPING, POLLING, ASKED = "lookahead", "lookahead, polls", "dense"
LAYERS = 4
"""Layers of the reference model: idle work does not depend on them, and short requests show a delay best."""
FILLED_TOKENS = 2_000


@dataclass(frozen=True)
class Setup:
    """The extent of the measurements.

    Attributes:
        seconds: over which CPU time is taken.
        idle_seconds: between two short requests.
        turns: of each server.
        prompt, output: tokens of the longer request.
    """

    seconds: float = 20.0
    idle_seconds: float = 5.0
    turns: int = 9
    prompt: int = 512
    output: int = 32


@contextlib.contextmanager
def stopped(servers: Sequence[Server]) -> Iterator[None]:
    """Stop servers within this context, so that they take no CPU time."""
    halted = [process for server in servers for process in processes(server)]
    for process in halted:
        process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        for process in reversed(halted):
            process.send_signal(signal.SIGCONT)


def measure(setup: Setup) -> dict[str, Any]:
    texts = Texts(60_000)
    with contextlib.ExitStack() as stack:
        model = truncated_model_path(LAYERS)
        starting = [launch_server(*flags, *COMMON, model=model) for flags in VARIANTS.values()]
        with ThreadPoolExecutor(len(starting)) as starters:
            servers = dict(zip(VARIANTS, starters.map(stack.enter_context, starting), strict=True))
        for server in servers.values():
            for _ in range(FILLED_TOKENS // 1000):
                server.generate(texts.take(1000), max_new_tokens=4)

        def only(*names: str) -> contextlib.AbstractContextManager[None]:
            return stopped([server for name, server in servers.items() if name not in names])

        shares = {}
        for name in report.progress(list(servers), "idle"):
            with only(name):
                shares[name] = idle_share(servers[name], setup.seconds)

        def next_request(name: str) -> float:
            with only(name):
                time.sleep(setup.idle_seconds)
                return seconds_to_answer(servers[name], texts.take(24), 1)

        def beside(*idle: str) -> float:
            with only(ASKED, *idle):
                time.sleep(1)
                return seconds_to_answer(servers[ASKED], texts.take(setup.prompt), setup.output)

        next_requests = compared(
            setup.turns,
            {"polls": lambda: next_request(POLLING), "sleeps": lambda: next_request(SLEEPING)},
            "next request",
        )
        beside_another = compared(
            setup.turns,
            {
                "alone": lambda: beside(),
                "beside one that sleeps": lambda: beside(SLEEPING),
                "beside one that polls": lambda: beside(POLLING),
            },
            "another server",
        )
    return {"idle_share": shares, "next_request": next_requests, "another_server": beside_another}


def show(record: Mapping[str, Any]) -> None:
    shares = [(name, f"{100 * share:.2f}%") for name, share in record["idle_share"].items()]
    report.show_table("CPU time of an idle server, of one core", ["server", "share"], shares)
    for key, title in (("next_request", "A short request after idleness"), ("another_server", "Another server")):
        rows = [
            (name, f"{1000 * found['seconds']:.0f}", f"{found['factor']:.2f}") for name, found in record[key].items()
        ]
        report.show_table(title, ["", "ms", "factor"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in asdict(Setup()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=default)
    setup = Setup(**vars(parser.parse_args()))
    record = measure(setup)
    show(record)
    report.save("idle", {"setup": asdict(setup), **record})


if __name__ == "__main__":
    main()
