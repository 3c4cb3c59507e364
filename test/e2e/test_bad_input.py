"""Bad input: one clear sentence, a non-zero exit, no traceback as the last word, nothing left running."""

from __future__ import annotations

import json
import shutil
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from sglang_oasis.reference_model import truncated_model_path
from sglang_oasis.testing.ports import reserve_port
from sglang_oasis.testing.processes import run
from sglang_oasis.testing.server import server_command
from test.e2e.refusals import ENVIRONMENT, LAUNCH_TIMEOUT, assert_refused, resolved

pytestmark = pytest.mark.e2e

AT_ONCE = 2

TINY = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 1000,
    "max_position_embeddings": 2048,
    "torch_dtype": "bfloat16",
}
# Name -> (config.json, what the refusal says of it).
UNSUPPORTED_MODELS: dict[str, tuple[dict[str, Any], str]] = {
    "deepseek_v2": (
        {
            **TINY,
            "architectures": ["DeepseekV2ForCausalLM"],
            "kv_lora_rank": 32,
            "q_lora_rank": None,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 16,
            "v_head_dim": 16,
            "n_routed_experts": 4,
            "moe_intermediate_size": 32,
            "num_experts_per_tok": 2,
        },
        "DeepseekV2ForCausalLM has latent attention (MLA)",
    ),
    "gemma3_text": (
        {**TINY, "architectures": ["Gemma3ForCausalLM"], "sliding_window": 128, "sliding_window_pattern": 2},
        "Gemma3ForCausalLM has sliding-window layers",
    ),
    "gpt_oss": (
        {**TINY, "architectures": ["GptOssForCausalLM"], "sliding_window": 128, "num_local_experts": 4},
        "GptOssForCausalLM has sliding-window layers",
    ),
    "whisper": (
        {
            "architectures": ["WhisperForConditionalGeneration"],
            "d_model": 64,
            "encoder_layers": 2,
            "decoder_layers": 2,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
        },
        "WhisperForConditionalGeneration has an encoder and cross attention",
    ),
    "bert": ({**TINY, "architectures": ["BertModel"]}, "BertModel has no decoder"),
    "falcon_h1": (
        {**TINY, "architectures": ["FalconH1ForCausalLM"], "mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16},
        "FalconH1ForCausalLM has state-space layers",
    ),
}

CONFLICTS: list[tuple[str, ...]] = [
    ("--attention-backend", "oasis_cpu"),
    ("--attention-backend", "torch_native"),
    ("--prefill-attention-backend", "torch_native"),
    ("--decode-attention-backend", "torch_native"),
    ("--enable-hierarchical-cache",),
    ("--enable-hisparse",),
    ("--enable-mixed-chunk",),
    ("--enable-unified-memory",),
    ("--enable-two-batch-overlap",),
    ("--enable-torch-compile",),
    ("--enable-memory-saver",),
    ("--enable-deterministic-inference",),
    ("--enable-lmcache",),
    ("--enable-flexkv",),
    ("--kv-cache-dtype", "fp8_e5m2"),
    ("--kv-cache-dtype", "fp8_e4m3"),
    ("--speculative-algorithm", "STANDALONE"),
    ("--disaggregation-mode", "prefill"),
    ("--disaggregation-mode", "decode"),
    ("--pp-size", "2"),
    ("--cpu-offload-gb", "1"),
    ("--is-embedding",),
]
# Flags -> what the refusal says.
REFUSED: dict[tuple[str, ...], str] = {
    **{conflict: f"--enable-lookahead-kv does not work with {' '.join(conflict)}" for conflict in CONFLICTS},
    ("--page-size", "1"): "--page-size must be one of 8, 16, 32 with sglang-oasis, got 1.",
    ("--page-size", "64"): "--page-size must be one of 8, 16, 32 with sglang-oasis, got 64.",
    (
        "--chunked-prefill-size",
        "100",
    ): "--chunked-prefill-size must be a multiple of the page size 16, got 100.",
    ("--json-model-override-args", "{bad"): "--json-model-override-args must be a JSON object, got {bad.",
    ("--tp-size", "2"): "--tp-size 2 does not divide the model's 9 query and 3 KV heads",
    ("--load-format", "gguf"): "--load-format gguf reads a file",
    ("--load-format", "sharded_state"): "--load-format sharded_state finds no model-rank",
    ("--page-size", "32", "--lookahead-kv-budget-tokens", "80"): "must be a multiple of the page size 32, got 80.",
    ("--lookahead-kv-selector", "psychic"): "--lookahead-kv-selector must be one of midrange, minmax, got psychic.",
    ("--lookahead-kv-source", "draft"): "--lookahead-kv-source draft needs drafts",
    ("--speculative-algorithm", "NGRAM"): "use --speculative-ngram-max-bfs-breadth 1",
    ("--speculative-algorithm", "EAGLE3", "--speculative-eagle-topk", "4"): "use --speculative-eagle-topk 1",
    (
        *("--speculative-algorithm", "NGRAM", "--speculative-ngram-max-bfs-breadth", "1"),
        *("--speculative-num-draft-tokens", "17"),
    ): "--speculative-num-draft-tokens must be at most a page of 16 tokens with --enable-lookahead-kv, got 17.",
    (
        "--lookahead-kv-fetch-ratio",
        "1.5",
    ): "--lookahead-kv-fetch-ratio must be in (0, 1] or 'auto', got 1.5.",
    (
        "--lookahead-kv-host-gb",
        "nan",
    ): "--lookahead-kv-host-gb must be a number of gigabytes above 0, or 'auto', got nan.",
    (
        "--lookahead-kv-dense-layers",
        "0,4",
    ): "--lookahead-kv-dense-layers must be layers of the model, 0 to 3, got 4.",
    ("--lookahead-kv-host-gb", "1000000"): "--lookahead-kv-host-gb of 1000000.00 GB per rank is more than",
    ("--lookahead-kv-host-gb", "0.001"): "0.001 GB of host memory are too little",
    ("--lookahead-kv-device-gb", "0.001"): "--lookahead-kv-device-gb of 0.001 GB is too small for one request",
}
# Flags for whose kernels or packages there is nothing on a CPU in the lean environment; also for the dense backend.
NOT_ON_A_CPU: dict[tuple[str, ...], str] = {
    ("--enable-lora",): "--enable-lora does not work on a CPU: merge the adapter into the model's weights",
    (
        "--lora-paths",
        "name=/folder",
    ): "--lora-paths does not work on a CPU: merge the adapters",
    ("--quantization", "fp8"): "--quantization fp8 does not work on a CPU: use a model in bfloat16 or float32",
    ("--moe-a2a-backend", "deepep"): "--moe-a2a-backend deepep does not work on a CPU: remove the flag",
    ("--ep-size", "2"): "--ep-size 2 does not work on a CPU: remove the flag",
    ("--moe-runner-backend", "triton"): "--moe-runner-backend triton does not work on a CPU: remove the flag",
    ("--grammar-backend", "outlines"): "--grammar-backend outlines needs the package outlines, which is not installed",
    ("--grammar-backend", "llguidance"): "--grammar-backend llguidance needs the package llguidance",
    ("--load-format", "fastsafetensors"): "--load-format fastsafetensors needs the package fastsafetensors",
    ("--load-format", "runai_streamer"): "--load-format runai_streamer needs the package runai_model_streamer",
}
REFUSED.update(NOT_ON_A_CPU)
# The same for the dense backend, without lookahead KV.
DENSE = ("--attention-backend", "oasis_cpu")
REFUSED_BY_DENSE: dict[tuple[str, ...], str] = {
    **{
        conflict: f"--attention-backend oasis_cpu does not work with {' '.join(conflict)}"
        for conflict in (
            ("--decode-attention-backend", "torch_native"),
            ("--enable-mixed-chunk",),
            ("--kv-cache-dtype", "fp8_e5m2"),
            ("--speculative-algorithm", "STANDALONE"),
        )
    },
    **NOT_ON_A_CPU,
    ("--page-size", "1"): "--page-size must be one of 8, 16, 32 with sglang-oasis, got 1.",
    ("--lookahead-kv-miss-policy", "fetch"): "--lookahead-kv-miss-policy has no effect without --enable-lookahead-kv",
}


class Ended(NamedTuple):
    """A launch that ended by itself."""

    exit_code: int
    last_line: str


def launch(*flags: str, model: Path, port: int | None = None, ordinary: bool = False) -> Ended:
    """Run the launcher to its end; nothing of its process group is left then."""
    argv = server_command("--enable-lookahead-kv", *flags, model=model, port=port)
    exit_code, output = run(argv, environment=ENVIRONMENT, timeout=LAUNCH_TIMEOUT, ordinary=ordinary)
    return Ended(exit_code, [line for line in output.splitlines() if line.strip()][-1])


@pytest.fixture(scope="module")
def model() -> Path:
    return truncated_model_path(4)


@pytest.fixture(scope="module")
def unsupported_models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders with a config.json only; nothing else is read before the refusal."""
    folders = {}
    for name, (config, _) in UNSUPPORTED_MODELS.items():
        folders[name] = tmp_path_factory.mktemp(name)
        (folders[name] / "config.json").write_text(json.dumps({"model_type": name, **config}))
    return folders


# --- real launches, two at a time ---


@pytest.fixture(scope="module")
def launches(
    model: Path, unsupported_models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Ended]]:
    truncated = tmp_path_factory.mktemp("damaged") / "model"
    shutil.copytree(model, truncated)
    with (truncated / "model.safetensors").open("r+b") as weights:
        weights.truncate(1_000_000)

    taken = reserve_port()
    with socket.create_server(("127.0.0.1", taken)), ThreadPoolExecutor(AT_ONCE) as pool:
        runs: dict[str, Callable[[], Ended]] = {
            "unknown choice": lambda: launch("--lookahead-kv-miss-policy", "wait", model=model),
            "out of range": lambda: launch("--lookahead-kv-budget-tokens", "100", model=model, ordinary=True),
            "unsupported model": lambda: launch("--load-format", "dummy", model=unsupported_models["gpt_oss"]),
            "host memory": lambda: launch("--lookahead-kv-host-gb", "0.001", model=model),
            "port": lambda: launch(model=model, port=taken),
            "truncated weights": lambda: launch(model=truncated),
            "no such model": lambda: launch(model=truncated / "nowhere"),
        }
        running = {name: pool.submit(run) for name, run in runs.items()}
        yield {name: run.result() for name, run in running.items()}


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("unknown choice", "error: argument --lookahead-kv-miss-policy: invalid choice: 'wait'"),
        ("out of range", "error: --lookahead-kv-budget-tokens must be a multiple of the page size 16, got 100."),
        ("unsupported model", "GptOssForCausalLM has sliding-window layers: start the server without the flag."),
        ("host memory", "error: 0.001 GB of host memory are too little"),
        ("port", "cannot be used (Address already in use): stop the program that uses it or choose another --port."),
        ("truncated weights", "model.safetensors is damaged (1000000 bytes long"),
        ("no such model", "nowhere does not exist: check --model-path."),
    ],
)
def test_a_launch_ends_with_one_sentence(launches: dict[str, Ended], name: str, sentence: str) -> None:
    assert launches[name].exit_code in (1, 2)
    assert "error: " in launches[name].last_line
    assert sentence in launches[name].last_line


# --- many refusals in one process ---


@pytest.fixture(scope="module")
def refusals(model: Path, unsupported_models: dict[str, Path]) -> dict[Any, dict[str, Any]]:
    """By flags, or by name of the unsupported model."""
    lines: dict[Any, list[str]] = {flags: ["--model-path", str(model), *flags] for flags in REFUSED}
    for name, folder in unsupported_models.items():
        lines[name] = ["--model-path", str(folder), "--load-format", "dummy"]
    lines["accepted"] = ["--model-path", str(model)]
    lines = {name: [*line, "--enable-lookahead-kv"] for name, line in lines.items()}
    for flags in REFUSED_BY_DENSE:
        lines["dense", *flags] = ["--model-path", str(model), *DENSE, *flags]
    lines["dense", "accepted"] = ["--model-path", str(model), *DENSE]
    outcomes = resolved(*lines.values())
    return dict(zip(lines, outcomes, strict=True))


def test_without_a_conflict_nothing_is_refused(refusals: dict[Any, dict[str, Any]]) -> None:
    """Otherwise the refusals below would say nothing."""
    assert refusals["accepted"]["enable_lookahead_kv"] is True
    assert refusals["dense", "accepted"]["enable_lookahead_kv"] is False


@pytest.mark.parametrize("flags", REFUSED, ids=" ".join)
def test_flags_are_refused_by_name(refusals: dict[Any, dict[str, Any]], flags: tuple[str, ...]) -> None:
    assert_refused(refusals[flags], REFUSED[flags])


@pytest.mark.parametrize("flags", REFUSED_BY_DENSE, ids=" ".join)
def test_flags_are_refused_by_the_dense_backend(refusals: dict[Any, dict[str, Any]], flags: tuple[str, ...]) -> None:
    assert_refused(refusals["dense", *flags], REFUSED_BY_DENSE[flags])


@pytest.mark.parametrize("name", UNSUPPORTED_MODELS)
def test_a_model_that_is_not_supported_is_refused(refusals: dict[Any, dict[str, Any]], name: str) -> None:
    assert_refused(refusals[name], UNSUPPORTED_MODELS[name][1])


# --- the other ways to give flags ---


def test_a_config_file_sets_the_flags(model: Path, tmp_path: Path) -> None:
    good, bad = tmp_path / "good.yaml", tmp_path / "bad.yaml"
    common = f"model-path: {model}\nenable-lookahead-kv: true\nlookahead-kv-miss-policy: fetch\n"
    good.write_text(common + "lookahead-kv-budget-tokens: 512\nlookahead-kv-host-gb: 0.5\n")
    bad.write_text(common + "lookahead-kv-budget-tokens: 100\n")
    accepted, refused = resolved(["--config", str(good)], ["--config", str(bad)])
    assert accepted["enable_lookahead_kv"] is True
    assert accepted["lookahead_kv_budget_tokens"] == 512
    assert accepted["lookahead_kv_host_gb"] == 0.5
    assert accepted["lookahead_kv_miss_policy"] == "fetch"
    assert_refused(refused, "--lookahead-kv-budget-tokens must be a multiple of the page size 16, got 100.")


def test_an_engine_raises_for_a_bad_value(model: Path, tmp_path: Path) -> None:
    program = tmp_path / "engine.py"
    program.write_text(
        "import sglang\n"
        "from sglang_oasis.errors import LookaheadKVError\n"
        "try:\n"
        f"    sglang.Engine(model_path={str(model)!r}, enable_lookahead_kv=True, lookahead_kv_budget_tokens=100)\n"
        "except LookaheadKVError as error:\n"
        "    print('raised:', error)\n"
    )
    exit_code, output = run([str(program)], environment=ENVIRONMENT, timeout=LAUNCH_TIMEOUT)
    assert exit_code == 0, output[-2000:]
    assert "raised: --lookahead-kv-budget-tokens must be a multiple of the page size 16, got 100." in output
