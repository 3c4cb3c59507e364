"""How many bytes each tier gets."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from sglang_oasis.config import LookaheadKVConfig
from sglang_oasis.errors import LookaheadKVError
from sglang_oasis.tier.layout import TierLayout
from sglang_oasis.tier.memory import available_host_bytes

AUTO_HOST_SHARE = 0.5
AUTO_CPU_DEVICE_SHARE = 0.25
"""Shares of the free host memory; on a CPU both tiers live there, and activations need the rest."""


class TierBudget(NamedTuple):
    """Bytes per rank.

    Attributes:
        host_bytes: host pool with its summaries.
        host_kv_bytes: of these, K and V; what SGLang divides into KV indices.
        device_bytes: resident tier with its maps and summaries.
    """

    host_bytes: int
    host_kv_bytes: int
    device_bytes: int


def divide_memory(
    config: LookaheadKVConfig,
    layout: TierLayout,
    *,
    device_is_host: bool,
    ranks: int,
    free_device_bytes: Callable[[], int],
    free_host_bytes: int | None = None,
) -> TierBudget:
    """Divide the memory that is free now.

    Args:
        config: the validated configuration.
        layout: sizes of the tiers.
        device_is_host: the device tier lives in host memory (CPU).
        ranks: ranks on this host that share its memory.
        free_device_bytes: bytes that SGLang would give its KV cache on the device; asked only when needed.
        free_host_bytes: free host memory, None to ask the machine.

    Raises:
        LookaheadKVError: what was asked for is not free.
    """
    free = available_host_bytes() if free_host_bytes is None else free_host_bytes
    share = free // ranks
    host = int(config.host_gb * 1e9) if config.host_gb is not None else int(share * AUTO_HOST_SHARE)
    if config.device_gb is not None:
        device = int(config.device_gb * 1e9)
    else:
        device = int(share * AUTO_CPU_DEVICE_SHARE) if device_is_host else free_device_bytes()
    wanted = host + (device if device_is_host else 0)
    if wanted > share:
        raise LookaheadKVError(
            f"{wanted / 1e9:.2f} GB of host memory per rank were asked for and {share / 1e9:.2f} GB are free: lower "
            f"--lookahead-kv-host-gb" + (" or --lookahead-kv-device-gb." if device_is_host else ".")
        )
    kv_share = layout.chunk_bytes / (layout.chunk_bytes + layout.summary_bytes)
    return TierBudget(host, int(host * kv_share), device)
