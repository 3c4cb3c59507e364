"""The command line of the planner."""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from sglang_oasis.config import AUTO, DEFAULT_BLOCK_SIZE, DEFAULT_FETCH_RATIO, LookaheadKVConfig
from sglang_oasis.errors import LookaheadKVError
from sglang_oasis.planner.capacity import Deployment, default_memory_fraction
from sglang_oasis.planner.hardware import GPUS, gpu_of
from sglang_oasis.planner.models import KNOWN_MODELS, model_of, short_name
from sglang_oasis.planner.plan import make_plan
from sglang_oasis.planner.plot import save_plot
from sglang_oasis.planner.report import print_plan, record_of

INVALID = 2


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Exit with one sentence, without the usage that argparse would print before it."""
        self.exit(INVALID, f"{message[0].upper()}{message[1:]}.\n")


def _number(least: float, most: float, kind: type[int] | type[float]) -> Callable[[str], int | float]:
    """Return a parser of numbers from `least` to `most`; with kind `float` both ends are excluded."""

    def parse(text: str) -> int | float:
        try:
            value = kind(text)
        except ValueError:
            value = kind(least - 1)
        if not (least <= value <= most if kind is int else least < value < most):
            wanted = (
                f"whole number from {least:g} to {most}"
                if kind is int
                else f"number above {least:g} and below {most:g}"
            )
            raise argparse.ArgumentTypeError(f"must be a {wanted}, got {text}")
        return value

    return parse


MOST = 10**9
"""Most tokens, GPUs or requests; a larger number is a typing error."""


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m sglang_oasis.planner",
        description="What lookahead KV gives a model on a GPU: requests, bytes, step times, and the flags for it.",
    )
    count, amount = _number(1, MOST, int), _number(0, 1e9, float)
    add = parser.add_argument
    add(
        "--model",
        required=True,
        help=f"a model's folder, its config.json, or one of {', '.join(map(short_name, KNOWN_MODELS))}",
    )
    add("--gpu", required=True, help=f"one of {', '.join(GPUS)}, or a JSON file with the fields of a GPU")
    add("--context", type=count, required=True, metavar="TOKENS", help="length of every request, prompt and output")
    add("--tp", type=count, default=1, metavar="GPUS", help="tensor-parallel GPUs, on one host (default: 1)")
    add("--host-gb", type=amount, metavar="GB", help="host memory for the KV cache, for all GPUs together "
        "(default: as much as the requests need)")  # fmt: skip
    add("--batch", type=count, metavar="REQUESTS", help="requests that decode concurrently (default: as many as fit)")
    add("--mem-fraction", type=_number(0, 1, float), metavar="SHARE", help="share of GPU memory for weights and KV "
        "cache (default: as SGLang would choose)")  # fmt: skip
    add("--weight-bits", type=_number(0, 64, float), metavar="BITS", help="bits per weight (default: by dtype)")
    add("--budget", type=count, default=2048, metavar="TOKENS", help="selected per KV head and layer (default: 2048)")
    add("--page-size", type=int, default=DEFAULT_BLOCK_SIZE, help="tokens per block: 8, 16 or 32 (default: 16)")
    add("--fetch-ratio", default=AUTO, metavar="SHARE", help="fetch cap as a share of the budget (default: what the "
        f"link can move during a step, at most {DEFAULT_FETCH_RATIO})")  # fmt: skip
    add("--summary-dtype", default="int4", help="bf16, int8 or int4 (default)")
    add("--dense-layers", default="", help="layers that keep every block on the device, e.g. 0,1")
    add("--drift", type=amount, metavar="BLOCKS", help="blocks that newly become wanted per step, KV head and layer "
        "(default: more than the fetch cap allows)")  # fmt: skip
    add("--output-json", type=Path, metavar="FILE", help="write the plan to this file as JSON")
    add("--plot", type=Path, metavar="FILE", help="write a figure to this file, in the format of its suffix")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a plan; returns the exit code: 2, with one sentence on standard error, if there is no plan."""
    asked = _parser().parse_args(arguments)
    try:
        gpu = gpu_of(asked.gpu)
        fraction = default_memory_fraction(gpu, asked.tp) if asked.mem_fraction is None else asked.mem_fraction
        deployment = Deployment(
            model=model_of(asked.model, asked.weight_bits),
            gpu=gpu,
            config=LookaheadKVConfig.from_flags(
                {
                    "lookahead_kv_budget_tokens": asked.budget,
                    "lookahead_kv_fetch_ratio": asked.fetch_ratio,
                    "lookahead_kv_summary_dtype": asked.summary_dtype,
                    "lookahead_kv_dense_layers": asked.dense_layers,
                },
                asked.page_size,
            ),
            context=asked.context,
            tp=asked.tp,
            host_bytes=None if asked.host_gb is None else round(asked.host_gb * 1e9),
            memory_fraction=fraction,
        )
        plan = make_plan(deployment, asked.batch, asked.drift)
        if asked.output_json is not None:
            _write_json(asked.output_json, record_of(plan))
        if asked.plot is not None:
            save_plot(plan, asked.plot)
        print_plan(plan)
    except LookaheadKVError as error:
        print(_in_own_words(str(error)), file=sys.stderr)
        return INVALID
    return 0


def _in_own_words(message: str) -> str:
    """Return a message about the server's flags with the planner's names of these flags."""
    for flag, words in {
        "--lookahead-kv-budget-tokens": "--budget",
        "--lookahead-kv-sink-tokens": "Sink tokens",
        "--lookahead-kv-": "--",
    }.items():
        message = message.replace(flag, words)
    return message


def _write_json(file: Path, record: object) -> None:
    try:
        file.write_text(json.dumps(record, indent=1) + "\n")
    except OSError as error:
        raise LookaheadKVError(f"--output-json {file} cannot be written ({error.strerror}): use another.") from None


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # end quietly when a reader such as `head` has enough
    sys.exit(main())
