"""Refuses flags whose kernels or packages this machine lacks, before the model is loaded.

Read from sglang 0.5.23: field names and choices of ServerArgs, `lora/layers.py` (pinned memory),
`constrained/base_grammar_backend.py`, `model_loader/loader.py`.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from sglang_oasis.errors import LookaheadKVError

# Field -> (values that work on a CPU, what to do instead). SGLang supports other values on GPUs only.
_ON_A_CPU: dict[str, tuple[tuple[Any, ...], str]] = {
    "enable_lora": ((None, False), "merge the adapter into the model's weights"),
    "lora_paths": ((None, [], {}), "merge the adapters into the model's weights"),
    "quantization": ((None, "unquant"), "use a model in bfloat16 or float32"),
    "moe_runner_backend": (("auto", None), "remove the flag"),
    "moe_a2a_backend": (("none", None), "remove the flag"),
    "ep_size": ((1,), "remove the flag"),
}
# (Field, value) -> the package that SGLang imports for it, after the model is loaded.
_PACKAGES: dict[tuple[str, str], str] = {
    ("grammar_backend", "outlines"): "outlines",
    ("grammar_backend", "llguidance"): "llguidance",
    ("grammar_backend", "xgrammar"): "xgrammar",
    ("load_format", "bitsandbytes"): "bitsandbytes",
    ("load_format", "fastsafetensors"): "fastsafetensors",
    ("load_format", "runai_streamer"): "runai_model_streamer",
}


def check_device_flags(view: Any) -> None:
    """Refuse flags that work on a GPU only.

    Args:
        view: the resolved arguments; the quantisation may come from the model.

    Raises:
        LookaheadKVError: one sentence.
    """
    if view.device != "cpu":
        return
    for field, (allowed, remedy) in _ON_A_CPU.items():
        value = getattr(view, field)
        if value not in allowed:
            raise LookaheadKVError(f"{as_typed(field, value)} does not work on a CPU: {remedy}.")


def check_packages(view: Any) -> None:
    """Refuse flags that need a package which is not installed.

    Raises:
        LookaheadKVError: one sentence.
    """
    for (field, value), package in _PACKAGES.items():
        if getattr(view, field) == value and find_spec(package) is None:
            raise LookaheadKVError(
                f"{as_typed(field, value)} needs the package {package}, which is not installed: install it or remove "
                f"the flag."
            )


def as_typed(field: str, value: Any) -> str:
    """Return a flag and its value as a user types them."""
    flag = "--" + field.replace("_", "-")
    return flag if value is True or not isinstance(value, str | int | float) else f"{flag} {value}"
