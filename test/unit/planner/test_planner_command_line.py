"""The planner's command line: what it refuses in one sentence, and what it prints, draws and writes."""

from __future__ import annotations

import json
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sglang_oasis.errors import LookaheadKVError
from sglang_oasis.planner.__main__ import main
from sglang_oasis.planner.hardware import GPUS, gpu_of
from sglang_oasis.planner.models import KNOWN_MODELS


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ("--model Qwen3-8B --gpu h100", "The following arguments are required: --context"),
        ("--model Qwen3-9B --gpu h100 --context 32768", "--model Qwen3-9B is not known"),
        ("--model nowhere/config.json --gpu h100 --context 32768", "has no readable config.json"),
        ("--model Qwen3-8B --gpu h1 --context 32768", "--gpu h1 is not known"),
        ("--model Qwen3-8B --gpu h100 --context 0", "got 0"),
        ("--model Qwen3-8B --gpu h100 --context many", "got many"),
        ("--model Qwen3-8B --gpu h100 --context 32768 --tp 3", "--tp 3 does not divide"),
        ("--model Qwen3-8B --gpu h100 --context 32768 --budget 100", "--budget must be a multiple"),
        ("--model Qwen3-8B --gpu h100 --context 32768 --page-size 7", "got 7"),
        ("--model Qwen3-8B --gpu h100 --context 32768 --fetch-ratio 2", "--fetch-ratio must be"),
        ("--model Qwen3-8B --gpu h100 --context 32768 --dense-layers 40", "--dense-layers must be"),
        ("--model Qwen3-8B --gpu h100 --context 32768 --batch 5000", "--batch 5000 does not fit"),
        ("--model Qwen3-8B --gpu h100 --context 32768 --host-gb 1", "--host-gb must be at least"),
        ("--model Qwen3-8B --gpu h100 --context 32768 --host-gb nan", "got nan"),
        ("--model Qwen3-8B --gpu h100 --context 32768 --mem-fraction 1.5", "got 1.5"),
        ("--model Qwen3-8B --gpu h100 --context 32768 --output-json /no/folder/f", "/no/folder/f cannot be written"),
        ("--model Llama-3.1-70B --gpu h100 --context 32768", "raise --tp"),
        ("--model Qwen3-8B --gpu h100 --context 900000000", "lower --budget or --context"),
        ("--model Qwen3-8B --gpu h100 --context 32768 --mem-fraction 1", "above 0 and below 1"),
        (
            "--model Qwen3-8B --gpu h100 --context 32768 --budget 16",
            "Sink tokens must be at least one page less",
        ),
        ("--model Qwen3-8B --gpu h100 --context 32768 --plot nosuffix", "--plot nosuffix has no suffix"),
        ("--model Qwen3-8B --gpu h100 --context 1e5", "must be a whole number"),
        ("--model '' --gpu h100 --context 32768", "--model '' is not known"),
        ("--model Qwen3-8B --gpu '' --context 32768", "--gpu '' is not known"),
        ("--model Qwen3-8B --gpu h100 --context 32768 --what", "Unrecognized arguments: --what"),
    ],
)
def test_what_is_impossible_gets_one_sentence_and_status_2(
    arguments: str, complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        status: object = main(shlex.split(arguments))
    except SystemExit as error:
        status = error.code
    out, message = capsys.readouterr()
    assert status == 2
    assert complaint in message
    assert "--lookahead-kv" not in message
    assert message.count("\n") == 1
    assert message.endswith(".\n")
    assert not out


@pytest.mark.parametrize(
    ("record", "complaint"),
    [
        ("{", "is not a JSON file"),
        ("[1]", "is not a JSON object"),
        ('{"name": "x"}', "lacks or misspells flops_per_second"),
        ({"link": 1}, "lacks or misspells link"),
        ({"memory_bytes": 0}, "memory_bytes must be .* got 0"),
        ({"flops_per_second": "fast"}, "flops_per_second must be .* got fast"),
        ({"flops_per_second": 1e300}, "flops_per_second must be a number from 1e\\+11 to 1e\\+17, .* got 1e\\+300"),
        ({"memory_bytes": 80}, "memory_bytes must be .*not GB.* got 80"),
        ({"memory_bytes_per_second": 3350}, "memory_bytes_per_second must be .* got 3350"),
        ({"link_bytes_per_second": float("nan")}, "link_bytes_per_second must be .* got nan"),
        ({"gather_bytes_per_second": 65e9}, "gather_bytes_per_second must be .* 6.4e\\+10, got 6.5e\\+10"),
        ({"name": 7}, "name must be a string, got 7"),
        ({"source": None}, "source must be a string, got None"),
    ],
)
def test_a_gpu_file_that_says_something_else_is_refused(record: Any, complaint: str, tmp_path: Path) -> None:
    text = record if isinstance(record, str) else json.dumps({**vars(GPUS["h100"]), **record})
    (tmp_path / "gpu.json").write_text(text)
    with pytest.raises(LookaheadKVError, match=complaint):
        gpu_of(str(tmp_path / "gpu.json"))


def test_a_gpu_file_gives_the_gpu_that_it_describes(tmp_path: Path) -> None:
    (tmp_path / "gpu.json").write_text(json.dumps(vars(GPUS["l40s"])))
    assert gpu_of(str(tmp_path / "gpu.json")) == GPUS["l40s"]


def test_tables_json_and_figure_show_one_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [tmp_path / "plan.json", tmp_path / "plan.png"]
    arguments = "--model Qwen3-8B --gpu h200 --context 65536 --tp 2 --host-gb 900 --output-json {} --plot {}"
    assert main(arguments.format(*files).split()) == 0
    record, out = json.loads(files[0].read_text()), capsys.readouterr().out
    assert record["command"] in out
    assert f"{record['capacity']['lookahead']} ({record['capacity']['bound']})" in out
    assert record["capacity"]["bound"] == "host memory"
    tiers = record["bytes"]["request"]
    device = sum(tiers[name] for name in ("resident", "head_maps", "averages", "row_summaries"))
    assert record["bytes"]["device_tier"] == (record["capacity"]["lookahead"] + 1) * device
    assert files[1].read_bytes().startswith(b"\x89PNG")


def test_tables_and_json_need_no_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("matplotlib", "matplotlib.figure", "matplotlib.axes"):
        monkeypatch.setitem(__import__("sys").modules, name, None)
    arguments = ["--model", "Qwen3-8B", "--gpu", "h100", "--context", "32768"]
    assert main([*arguments, "--output-json", str(tmp_path / "plan.json")]) == 0
    assert main([*arguments, "--plot", str(tmp_path / "plan.png")]) == 2


def planned(arguments: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(shlex.split(arguments)) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize(("context", "warned"), [(40_960, False), (40_961, True)])
def test_a_context_beyond_what_the_model_was_made_for_is_remarked(
    context: int, warned: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    out = planned(f"--model Qwen3-8B --gpu h100 --context {context}", capsys)
    assert ("# Qwen/Qwen3-8B was made for 40960 tokens" in out) == warned


@pytest.mark.parametrize(("bits", "quantised", "remarked"), [(4, False, True), (4, True, False), (16, False, False)])
def test_weights_of_other_bits_than_the_checkpoint_are_remarked(
    bits: int, quantised: bool, remarked: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = {**KNOWN_MODELS["Qwen/Qwen3-8B"], "quantization_config": {"bits": bits} if quantised else None}
    (tmp_path / "config.json").write_text(json.dumps(config))
    out = planned(f"--model {tmp_path} --gpu h100 --context 32768 --weight-bits {bits}", capsys)
    assert (f"# --model-path must name a checkpoint with {bits} bits per weight" in out) == remarked


def test_a_lone_configuration_file_is_no_model_path(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "qwen.json"
    file.write_text(json.dumps(KNOWN_MODELS["Qwen/Qwen3-8B"]))
    out = planned(f"--model {file} --gpu h100 --context 32768", capsys)
    assert "--model-path MODEL_FOLDER " in out
    assert f"# Replace MODEL_FOLDER by the model folder to which {file} belongs." in out


@pytest.mark.parametrize("tp", [1, 2])
def test_the_host_memory_that_is_asked_for_is_enough(tp: int, capsys: pytest.CaptureFixture[str]) -> None:
    asked = f"--model Qwen3-8B --gpu h100 --context 32768 --tp {tp} --host-gb"
    assert main(shlex.split(f"{asked} 3")) == 2
    (least,) = re.findall(r"--host-gb must be at least (\S+) for", capsys.readouterr().err)
    assert "(host memory)" in planned(f"{asked} {least}", capsys)


def test_the_host_memory_of_all_ranks_stands_beside_the_throughput(capsys: pytest.CaptureFixture[str]) -> None:
    ask = "--model Qwen3-8B --gpu h100 --context 32768 --batch 100 --tp"
    # 100 requests of 2048 pages and one page more; a page of 8 heads in 36 layers is 8192 + 132 bytes each.
    assert "490.97 GB" in planned(f"{ask} 1", capsys)
    assert "2 x 245.49 = 490.97 GB" in planned(f"{ask} 2", capsys)


def test_a_reader_that_has_enough_sees_no_traceback() -> None:
    program = [sys.executable, "-m", "sglang_oasis.planner"]
    with subprocess.Popen(
        [*program, "--model", "Qwen3-8B", "--gpu", "h100", "--context", "32768"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as planner:
        assert planner.stdout is not None
        assert planner.stderr is not None
        planner.stdout.close()
        assert planner.stderr.read() == b""
    assert planner.returncode == -signal.SIGPIPE
