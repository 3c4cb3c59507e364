"""What a CPU, or a missing package, cannot serve is refused by name; a GPU or an installed package lets it pass."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sglang_oasis.errors import LookaheadKVError
from sglang_oasis.seams import machine_flags

DEFAULTS: dict[str, Any] = {
    "enable_lora": None,
    "lora_paths": None,
    "quantization": None,
    "moe_runner_backend": "auto",
    "moe_a2a_backend": "none",
    "ep_size": 1,
    "grammar_backend": "xgrammar",
    "load_format": "auto",
}
FOR_GPUS = [
    ("enable_lora", True, "--enable-lora does"),
    ("lora_paths", {"name": "/folder"}, "--lora-paths does"),
    ("quantization", "gptq", "--quantization gptq does"),
    ("moe_runner_backend", "triton", "--moe-runner-backend triton does"),
    ("moe_a2a_backend", "deepep", "--moe-a2a-backend deepep does"),
    ("ep_size", 2, "--ep-size 2 does"),
]


def view(device: str, **given: Any) -> SimpleNamespace:
    return SimpleNamespace(device=device, **{**DEFAULTS, **given})


@pytest.mark.parametrize(("field", "value", "sentence"), FOR_GPUS)
def test_what_only_a_gpu_serves(field: str, value: Any, sentence: str) -> None:
    machine_flags.check_device_flags(view("cpu"))
    machine_flags.check_device_flags(view("cuda", **{field: value}))
    with pytest.raises(LookaheadKVError, match=f"^{sentence} not work on a CPU: "):
        machine_flags.check_device_flags(view("cpu", **{field: value}))


def test_a_package_is_needed_where_its_flag_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = view("cpu", grammar_backend="llguidance")
    monkeypatch.setattr(machine_flags, "find_spec", lambda name: object())
    machine_flags.check_packages(asked)
    monkeypatch.setattr(machine_flags, "find_spec", lambda name: None if name == "llguidance" else object())
    machine_flags.check_packages(view("cpu"))
    with pytest.raises(LookaheadKVError, match=r"^--grammar-backend llguidance needs the package llguidance"):
        machine_flags.check_packages(asked)
