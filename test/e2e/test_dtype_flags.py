"""What the launcher makes of --dtype, --kv-cache-dtype and --sleep-on-idle, on CPUs with slow and fast 16-bit products.

One process resolves all of them; how fast the CPU is, the test says.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from typing import Any

import pytest

from sglang_oasis.reference_model import truncated_model_path
from sglang_oasis.testing.processes import run
from test.e2e.sources import write_untrained_head

pytestmark = pytest.mark.e2e

SCRIPT = """
import json, sys
from sglang.srt.plugins import load_plugins
load_plugins()
from sglang.srt import server_args
from sglang.srt.arg_groups.overrides import model_config_of, resolved_view
from sglang_oasis.seams import dtypes

SHOWN = "dtype", "kv_cache_dtype", "sleep_on_idle"

def resolve(asked, rates):
    dtypes.product_rates = lambda kinds: rates
    try:
        known = isinstance(asked, dict)
        record = server_args.ServerArgs(**asked) if known else server_args.prepare_server_args(asked)
        record.resolve_once()
    except Exception as error:
        return {"error": str(error)}
    view = resolved_view(record)
    return {name: getattr(view, name) for name in SHOWN} | {"model": str(model_config_of(record).dtype)}

print("RESOLVED", json.dumps([resolve(*case) for case in json.loads(sys.argv[1])]))
"""
SLOW, FAST = (20e9, 80e9), (200e9, 80e9)
MEMORY = ("--lookahead-kv-host-gb", "0.2", "--lookahead-kv-device-gb", "0.2", "--context-length", "1024")
LOOKAHEAD = ("--enable-lookahead-kv", *MEMORY)
DENSE = ("--attention-backend", "oasis_cpu")
EAGLE3 = ("--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", "HEAD")
AUTO = ("auto", "auto", "torch.bfloat16")
MIXED = ("float32", "bfloat16", "torch.float32")

# (model, flags, rates) -> dtype and KV cache dtype as they are resolved, dtype of the model.
DTYPES: dict[tuple[str, tuple[str, ...], tuple[float, float]], tuple[str, str, str]] = {
    ("bfloat16", LOOKAHEAD, SLOW): MIXED,
    ("bfloat16", LOOKAHEAD, FAST): AUTO,
    ("bfloat16", (*LOOKAHEAD, *EAGLE3), SLOW): MIXED,
    ("bfloat16", DENSE, SLOW): MIXED,
    ("bfloat16", DENSE, FAST): AUTO,
    ("bfloat16", (*LOOKAHEAD, "--dtype", "auto"), SLOW): MIXED,
    ("bfloat16", (*LOOKAHEAD, "--dtype", "bfloat16"), SLOW): ("bfloat16", "auto", "torch.bfloat16"),
    ("bfloat16", (*DENSE, "--dtype", "float32"), SLOW): ("float32", "auto", "torch.float32"),
    ("bfloat16", (*DENSE, "--kv-cache-dtype", "bf16"), SLOW): ("float32", "bf16", "torch.float32"),
    ("bfloat16", (*DENSE, "--kv-cache-dtype", "bf16"), FAST): ("auto", "bf16", "torch.bfloat16"),
    ("bfloat16", (*LOOKAHEAD, "--dtype", "float32", "--kv-cache-dtype", "bf16"), SLOW): (
        *("float32", "bf16"),
        "torch.float32",
    ),
    ("float16", LOOKAHEAD, SLOW): ("float32", "float16", "torch.float32"),
    ("float16", LOOKAHEAD, FAST): ("auto", "auto", "torch.float16"),
    # SGLang halves what is in float32; so much fits in its cache.
    ("float32", DENSE, SLOW): ("float32", "float16", "torch.float32"),
    ("bfloat16", (), SLOW): AUTO,
    # Nodes would decide for themselves, and their ranks must agree.
    ("bfloat16", (*DENSE, "--nnodes", "3", "--tp-size", "3", "--dist-init-addr", "127.0.0.1:29"), SLOW): AUTO,
}
SLEEPS: dict[tuple[str, ...], bool] = {
    LOOKAHEAD: True,
    DENSE: True,
    (): False,
    ("--sleep-on-idle",): True,
    (*LOOKAHEAD, "--sleep-on-idle"): True,
    (*LOOKAHEAD, "--sleep-on-idle", "false"): False,
    (*DENSE, "--sleep-on-idle", "False"): False,
    ("--sleep-on-idle", "--skip-server-warmup", *DENSE): True,
    (*LOOKAHEAD, "--config", "sleep-on-idle: false"): False,
    (*LOOKAHEAD, "--config", "sleep-on-idle: true"): True,
    (*LOOKAHEAD, "--config", "skip-server-warmup: true"): True,
}
ENGINE: dict[tuple[str, bool | None], bool] = {
    ("enable_lookahead_kv", None): True,
    ("enable_lookahead_kv", False): False,
    ("enable_lookahead_kv", True): True,
    ("disable_overlap_schedule", None): False,
    ("disable_overlap_schedule", True): True,
}
"""(another keyword, sleep_on_idle where it is given) -> what becomes of it."""
TOO_SMALL = ("--enable-lookahead-kv", "--lookahead-kv-device-gb", "0.0001", "--context-length", "1024")
LEAST = [(*TOO_SMALL, *dtype, *draft) for draft in ((), EAGLE3) for dtype in ((), ("--dtype", "float32"))]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[Any, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("models")
    (folder / "head").mkdir()
    model, head = truncated_model_path(4), write_untrained_head(folder / "head")
    config = json.loads((model / "config.json").read_text())
    for dtype in ("bfloat16", "float16", "float32"):
        copied = shutil.copytree(model, folder / dtype)
        others = {name: value for name, value in config.items() if name != "torch_dtype"}
        (copied / "config.json").write_text(json.dumps({**others, "dtype": dtype}))

    def command(dtype: str, flags: tuple[str, ...]) -> list[str]:
        words = [str(head) if word == "HEAD" else word for word in flags]
        if "--config" in words:
            (file := folder / f"{len(list(folder.iterdir()))}.yaml").write_text(words[-1])
            words[-1] = str(file)
        return ["--model-path", str(folder / dtype), *words]

    asked: dict[Any, Any] = {case: (command(*case[:2]), case[2]) for case in DTYPES}
    asked |= {flags: (command("bfloat16", flags), FAST) for flags in SLEEPS}
    asked |= {flags: (command("bfloat16", flags), SLOW) for flags in LEAST}
    for keyword, sleeps in ENGINE:
        given = {} if sleeps is None else {"sleep_on_idle": sleeps}
        asked[keyword, sleeps] = ({"model_path": str(folder / "bfloat16"), keyword: True, **given}, FAST)
    (script := folder / "resolve.py").write_text(SCRIPT)
    argv = [str(script), json.dumps(list(asked.values()))]
    exit_code, output = run(argv, environment=os.environ, timeout=200)
    assert exit_code == 0, output
    (line,) = [line for line in output.splitlines() if line.startswith("RESOLVED ")]
    return dict(zip(asked, json.loads(line.removeprefix("RESOLVED ")), strict=True))


@pytest.mark.parametrize("case", DTYPES, ids=lambda case: f"{case[0]} {' '.join(case[1])} {case[2][0] / case[2][1]}")
def test_auto_is_float32_on_a_cache_of_the_checkpoints_dtype_where_16_bit_products_are_slow(
    outcomes: dict[Any, dict[str, Any]], case: Any
) -> None:
    outcome = outcomes[case]
    assert tuple(outcome.get(name) for name in ("dtype", "kv_cache_dtype", "model")) == DTYPES[case], outcome


@pytest.mark.parametrize("flags", SLEEPS, ids=" ".join)
def test_our_servers_sleep_when_idle_unless_told_otherwise(
    outcomes: dict[Any, dict[str, Any]], flags: tuple[str, ...]
) -> None:
    assert outcomes[flags].get("sleep_on_idle") is SLEEPS[flags], outcomes[flags]


@pytest.mark.parametrize("keywords", ENGINE, ids=str)
def test_the_engine_says_it_with_a_keyword(outcomes: dict[Any, dict[str, Any]], keywords: tuple[str, bool]) -> None:
    assert outcomes[keywords].get("sleep_on_idle") is ENGINE[keywords], outcomes[keywords]


def test_the_least_memory_is_that_of_the_cache_that_will_be_used(outcomes: dict[Any, dict[str, Any]]) -> None:
    least = [float(re.findall(r"takes ([\d.]+) GB", outcomes[flags]["error"])[0]) for flags in LEAST]
    mixed, float32, mixed_with_head, float32_with_head = least
    assert mixed < 0.7 * float32
    assert mixed_with_head - mixed < 0.7 * (float32_with_head - float32)
