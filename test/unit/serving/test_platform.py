"""The CPU platform answers whatever SGLang asks a platform."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import sglang.srt
import torch
from sglang.srt.platforms.interface import SRTPlatform

from sglang_oasis.serving.cpu_platform.cpu import OasisCpuPlatform

ARGUMENTS: dict[str, Any] = {
    "algorithm": "EAGLE3",
    "backend": "torch_native",
    "device": torch.device("cpu"),
    "device_id": 0,
    "kind": "mha",
    "local_rank": 0,
    "mode": None,
    "model": torch.nn.Identity(),
    "phase": "draft_decode",
    "quant": "fp8",
    "quantization": "fp8",
    "seed": None,
    "server_args": SimpleNamespace(attention_backend=None),
}
METHODS = [name for name, _ in inspect.getmembers(SRTPlatform, callable) if not name.startswith("_")]


@pytest.mark.parametrize("name", METHODS)
def test_every_method_of_the_interface_has_an_answer(name: str) -> None:
    method = getattr(OasisCpuPlatform(), name)
    parameters = inspect.signature(method).parameters.values()
    by_name = [parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY]
    by_place = [parameter.name for parameter in parameters if parameter.name not in by_name]
    method(*(ARGUMENTS[name] for name in by_place), **{name: ARGUMENTS[name] for name in by_name})


def test_it_has_whatever_sglang_asks_for() -> None:
    sources = Path(sglang.srt.__path__[0]).rglob("*.py")
    asked = {name for source in sources for name in re.findall(r"\bcurrent_platform\.(\w+)", source.read_text())}
    assert {"get_torch_profiler_activity_str", "get_device", "is_out_of_tree"} <= asked
    platform = OasisCpuPlatform()
    assert {name for name in asked if not hasattr(platform, name)} == set()


def test_a_profile_of_it_is_one_of_the_cpu() -> None:
    platform = OasisCpuPlatform()
    assert platform.get_torch_profiler_activity_str() == "CPU"
    with torch.profiler.profile(activities=[platform.get_torch_profiler_activity()]) as profile:
        torch.ones(2) + 1
    assert any(event.key == "aten::add" for event in profile.key_averages())
