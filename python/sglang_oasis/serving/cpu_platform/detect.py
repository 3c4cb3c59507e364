"""Decides whether this machine needs the CPU platform."""

from __future__ import annotations

import os

import torch


def cpu_platform_wanted() -> bool:
    """Whether the machine has no accelerator and SGLang's own CPU engine was not asked for."""
    if os.environ.get("SGLANG_USE_CPU_ENGINE", "0") == "1":
        return False
    if torch.cuda.is_available() or torch.xpu.is_available() or torch.backends.mps.is_available():
        return False
    added_by_vendors = (getattr(torch, name, None) for name in ("npu", "hpu", "musa"))
    return not any(device is not None and device.is_available() for device in added_by_vendors)
