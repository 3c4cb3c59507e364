"""Decides how many bytes each tier gets."""

from __future__ import annotations

from typing import NamedTuple

from sglang_oasis.config import LookaheadKVConfig
from sglang_oasis.errors import LookaheadKVError
from sglang_oasis.tier.host_memory.available import available_host_bytes

AUTO_HOST_SHARE = 0.5
AUTO_CPU_DEVICE_SHARE = 0.25
"""Shares of the free host memory; on a CPU both tiers are in host memory, and activations need the rest."""

UNKNOWN = 1 << 62
"""Stands for the free bytes of a GPU, which are not known before the model is loaded."""


class TierBudget(NamedTuple):
    """Bytes of the tiers per rank.

    Attributes:
        host_bytes: host pool with its summaries.
        device_bytes: resident tier with its maps and summaries.
    """

    host_bytes: int
    device_bytes: int


def divide_memory(
    config: LookaheadKVConfig,
    *,
    ranks: int,
    free_device_bytes: int | None,
    free_host_bytes: int | None = None,
) -> TierBudget:
    """Divide the free memory between the tiers.

    Args:
        config: the validated configuration.
        ranks: ranks on this host that share its memory.
        free_device_bytes: bytes that SGLang would give its KV cache on this rank's device; None on a CPU, where the
            device tier is in host memory.
        free_host_bytes: free host memory, None to measure it.

    Raises:
        LookaheadKVError: the flags ask for more than is free.
    """
    share = (available_host_bytes() if free_host_bytes is None else free_host_bytes) // ranks
    host, device = _asked(config.host_gb), _asked(config.device_gb)
    _require_free("--lookahead-kv-host-gb", "host", host or 0, share)
    if free_device_bytes is not None:
        _require_free("--lookahead-kv-device-gb", "device", device or 0, free_device_bytes)
        host = int(share * AUTO_HOST_SHARE) if host is None else host
        device = free_device_bytes if device is None else device
    else:
        both = (host or 0) + (device or 0)
        _require_free("--lookahead-kv-host-gb plus --lookahead-kv-device-gb", "host", both, share)
        host = min(int(share * AUTO_HOST_SHARE), share - both) if host is None else host
        device = min(int(share * AUTO_CPU_DEVICE_SHARE), share - host) if device is None else device
    return TierBudget(host, device)


def _asked(gigabytes: float | None) -> int | None:
    return None if gigabytes is None else int(gigabytes * 1e9)


def _require_free(flags: str, memory: str, wanted: int, free: int) -> None:
    if wanted > free:
        raise LookaheadKVError(
            f"{flags} of {wanted / 1e9:.2f} GB per rank is more than the {free / 1e9:.2f} GB of {memory} memory that "
            f"are free: lower it."
        )
