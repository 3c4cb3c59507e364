"""The platform with which SGLang's stock wheel serves on any x86-64 or arm64 CPU, without its compiled CPU kernels.

Read from sglang 0.5.23: `platforms/interface.py` (SRTPlatform), `platforms/cpu.py` (CpuDeviceMixin). For an out-of-tree
platform with default capabilities, SGLang uses its torch-native allocator, writers and samplers. Remove this when the
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
    """Speculative algorithms with a draft model whose ops are installed; `seams/speculation.py` adds to them."""

    def get_device(self, device_id: int = 0) -> str:
        # A string as in DeviceMixin: SGLang splits it at ":" when --device is not given.
        return "cpu"

    def get_default_attention_backend(self) -> str:
        return ATTENTION_BACKEND

    def get_default_speculative_draft_attention_backend(self, algorithm: str) -> str:
        return ATTENTION_BACKEND

    def get_torch_profiler_activity_str(self) -> str:
        # The name of this device in the `activities` of a profile request.
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

        # SGLang's default on x86-64 is intel_amx, which needs AMX and SGLang's CPU kernel package.
        if server_args.attention_backend in (None, "intel_amx") and not cpu_has_amx_support():
            server_args.attention_backend = ATTENTION_BACKEND
