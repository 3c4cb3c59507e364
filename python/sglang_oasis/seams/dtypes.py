"""Chooses the dtype in which a server computes, and the one in which it stores K and V.

On a CPU without fast products in the checkpoint's 16-bit dtype, `--dtype auto` computes in float32; the KV cache keeps
the checkpoint's dtype, so that as many tokens fit as before. A dtype that the user has given is not changed.

Read from sglang 0.5.23: `configs/model_config.ModelConfig.dtype` (what `auto` makes of a checkpoint),
`arg_groups/model_override_base.model_config_of` (memoised on the record as `_model_config`),
`mem_cache/kv_cache_dtype.configure_kv_cache_dtype` (AROUND: of the unquantised dtypes it knows bfloat16 only; when
upstream knows the others, remove the hook).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from sglang_oasis.product_rates import product_rates
from sglang_oasis.seams.launch_environment import parameters_in, ranks_per_host
from sglang_oasis.seams.seam import Seam
from sglang_oasis.tier.host_memory.available import available_host_bytes

logger = logging.getLogger(__name__)

SOURCE = "lookahead_kv.dtype"
AUTO = "auto"
KV_DTYPES = {
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
}
"""Values of --kv-cache-dtype without quantisation, besides `auto`, which means the dtype of the computation."""
SLOW = 0.8
"""A dtype is slow below this share of float32's rate: CPUs without products in the dtype reach 0.1 to 0.5, others 2."""
MOST_OF_FREE = 0.5
"""Share of the free memory that float32 weights may take; the KV cache takes a part of the rest."""


class Room(NamedTuple):
    """The memory that float32 weights need, and the memory that is available.

    Attributes:
        weights: bytes of all replicas, None where they are not on this machine yet.
        free: bytes of free host memory.
        asked: bytes of free host memory that flags reserve for the tiers.
    """

    weights: int | None
    free: int
    asked: int

    @property
    def suffices(self) -> bool:
        return self.weights is None or self.weights <= min(MOST_OF_FREE * self.free, self.free - self.asked)


class Decision(NamedTuple):
    """Whether to compute in float32, and the log message about it; no message if nothing changes."""

    in_float32: bool
    sentence: str | None


def decide(dtype: torch.dtype, rates: Sequence[float], room: Room, kept: str) -> Decision:
    """Decide which dtype `--dtype auto` stands for.

    Args:
        dtype: the 16-bit dtype in which SGLang would compute.
        rates: operations per second in `dtype` and in float32.
        room: memory for the weights.
        kept: dtype of the KV cache.
    """
    rate, float32_rate = rates
    if rate >= SLOW * float32_rate:
        return Decision(False, None)
    name = name_of(dtype)
    found = (
        f"This CPU multiplies {name} matrices at {rate / 1e9:.0f} GFLOP/s per core, and float32 ones at "
        f"{float32_rate / 1e9:.0f}"
    )
    if not room.suffices:
        assert room.weights is not None
        return Decision(
            False,
            f"{found}, but float32 weights of {room.weights / 1e9:.1f} GB are too much for the "
            f"{room.free / 1e9:.1f} GB that are free: --dtype auto computes in {name}, slowly.",
        )
    return Decision(
        True,
        f"{found}: --dtype auto computes in float32 and keeps K and V in {kept}; to compute in {name}, give "
        f"--dtype {name}.",
    )


def choose_dtypes(server_args: Any) -> None:
    """Replace `--dtype auto` by the dtype for this CPU, before the resolution and the model's configuration use it."""
    from sglang.srt.arg_groups.overrides import declare_resolution, model_config_of, resolving_view

    view = resolving_view(server_args)
    # Launchers on several nodes would decide independently, but their ranks must agree.
    if view.device != "cpu" or view.dtype != AUTO or view.nnodes > 1:
        return
    model = model_config_of(server_args)
    if model.quantization is not None or model.dtype.itemsize != 2:
        return
    kept = name_of(model.dtype) if view.kv_cache_dtype == AUTO else view.kv_cache_dtype
    decision = decide(model.dtype, product_rates((model.dtype, torch.float32)), _room(view), kept)
    if decision.sentence is not None:
        logger.info("%s", decision.sentence)
    if decision.in_float32:
        declare_resolution(server_args, SOURCE, dtype="float32", kv_cache_dtype=kept)
        server_args._model_config = None  # was made for the other dtype


def kv_dtype(view: Any, compute: torch.dtype) -> torch.dtype:
    """Return the dtype of the KV cache, from the resolved arguments and the dtype of the computation."""
    return KV_DTYPES.get(view.kv_cache_dtype, compute)


def name_of(dtype: torch.dtype) -> str:
    """Return the name of a dtype as a user types it."""
    return str(dtype).removeprefix("torch.")


def _room(view: Any) -> Room:
    parameters = parameters_in(Path(view.model_path))
    if parameters is not None and view.speculative_draft_model_path is not None:
        parameters += parameters_in(Path(view.speculative_draft_model_path)) or 0
    gigabytes = [view.lookahead_kv_host_gb, view.lookahead_kv_device_gb]
    per_rank = sum(int(size * 1e9) for size in gigabytes if isinstance(size, (int, float)))
    return Room(
        None if parameters is None else parameters * torch.float32.itemsize * view.dp_size,
        available_host_bytes(),
        per_rank * ranks_per_host(view),
    )


def _configure(
    original: Callable[..., tuple[str | None, torch.dtype]], *, server_args_kv_cache_dtype: str, **others: Any
) -> tuple[str | None, torch.dtype]:
    if server_args_kv_cache_dtype in ("float16", "float32"):
        return None, KV_DTYPES[server_args_kv_cache_dtype]
    return original(server_args_kv_cache_dtype=server_args_kv_cache_dtype, **others)


SEAMS = [Seam("mem_cache.kv_cache_dtype.configure_kv_cache_dtype", _configure, "AROUND")]
