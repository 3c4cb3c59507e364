"""Serves with the stock wheel on any x86-64 or arm64 CPU, without CUDA, AMX or a compiled CPU kernel package.

Read from sglang 0.5.23: `platforms/interface.py` (SRTPlatform), `platforms/cpu.py` (CpuDeviceMixin). As an out-of-tree
platform with default capabilities SGLang takes its torch-native allocator, writers and samplers. Remove this when the
in-tree CPU platform runs without its kernel package.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import PlatformCapabilities, SRTPlatform

ATTENTION_BACKEND = "torch_native"


class OasisCpuPlatform(CpuDeviceMixin, SRTPlatform):
    """A CPU on which every op is plain torch."""

    _enum = PlatformEnum.OOT
    capabilities = PlatformCapabilities()
    drafted_algorithms: tuple[str, ...] = ()
    """Speculative algorithms with a draft model whose ops are in place; `seams/speculation.py` adds to them."""

    def get_device(self, device_id: int = 0) -> str:
        # A string as in DeviceMixin: SGLang splits it at ":" when --device is not given.
        return "cpu"

    def get_default_attention_backend(self) -> str:
        return ATTENTION_BACKEND

    def get_default_speculative_draft_attention_backend(self, algorithm: str) -> str:
        return ATTENTION_BACKEND

    def get_torch_profiler_activity_str(self) -> str:
        # What a profile request calls this device in its `activities`.
        return "CPU"

    def get_torch_profiler_activity(self) -> torch.profiler.ProfilerActivity:
        return torch.profiler.ProfilerActivity.CPU

    def supports_speculative_algorithm(self, algorithm: str) -> bool:
        return algorithm in self.drafted_algorithms

    def get_speculative_cache_locs_fn(self) -> Any:
        from sglang_oasis.serving.cpu_platform.speculative import extend_cache_locs

        return extend_cache_locs

    def apply_server_args_defaults(self, server_args: Any) -> None:
        from sglang.srt.utils.common import cpu_has_amx_support  # imports the platform, so not at module level

        # SGLang fills in intel_amx on x86-64, which needs AMX and its CPU kernel package.
        if server_args.attention_backend in (None, "intel_amx") and not cpu_has_amx_support():
            server_args.attention_backend = ATTENTION_BACKEND
