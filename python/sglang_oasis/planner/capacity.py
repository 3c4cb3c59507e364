"""How many requests fit, dense (OasisKV Eq. 1 and 2) and with lookahead KV, and how many bytes each tier takes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from sglang_oasis.config import LookaheadKVConfig
from sglang_oasis.errors import LookaheadKVError
from sglang_oasis.planner.hardware import MIB, Gpu
from sglang_oasis.planner.models import ModelShape
from sglang_oasis.tier.layout import TierLayout
from sglang_oasis.tier.prefill.staging import PrefillStaging
from sglang_oasis.tier.window import Window

MEGABYTE = 10**6


@dataclass(frozen=True)
class Deployment:
    """The system to plan: a model on `tp` equal GPUs of one host.

    Attributes:
        model, gpu: the model's sizes and the GPU's data.
        config: the configuration of lookahead KV.
        context: tokens of every request, prompt and output.
        tp: tensor-parallel ranks.
        host_bytes: host memory for the KV cache of all ranks, None for as much as is needed.
        memory_fraction: share of each GPU's memory for weights and KV cache (SGLang's --mem-fraction-static).
    """

    model: ModelShape
    gpu: Gpu
    config: LookaheadKVConfig
    context: int
    tp: int
    host_bytes: int | None
    memory_fraction: float

    def __post_init__(self) -> None:
        model, tp = self.model, self.tp
        if model.query_heads % tp or (model.kv_heads % tp and tp % model.kv_heads):
            raise LookaheadKVError(
                f"--tp {tp} does not divide the {model.query_heads} query heads and {model.kv_heads} KV heads of "
                f"{model.name}: use another number of GPUs."
            )
        if self.kv_bytes <= 0:
            raise LookaheadKVError(
                f"{model.name} takes {self.weight_bytes / 1e9:.1f} GB of each {self.gpu.name}, but only "
                f"{self.static_bytes / 1e9:.1f} GB are for weights and KV cache: raise --tp or --mem-fraction."
            )

    @property
    def layout(self) -> TierLayout:
        """The tiers of one rank, as the server would lay them out."""
        return TierLayout.of(
            self.config,
            num_layers=self.model.layers,
            kv_heads=self.model.kv_heads_of_rank(self.tp),
            head_dim=self.model.head_dim,
            dtype=self.model.dtype,
            context_length=self.context,
            draft_tokens=self.config.draft_tokens,
        )

    @property
    def fetchable_blocks(self) -> int:
        """Selectable blocks of a request of `context` tokens that are not resident, per KV head and sparse layer."""
        layout = self.layout
        window = Window(self.context, layout.block_size, layout.recent_blocks)
        return max(0, window.first_local - min(layout.selected_blocks))

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights on one rank."""
        return int(self.model.parameters * self.model.weight_bytes / self.tp)

    @property
    def static_bytes(self) -> int:
        """Bytes of one GPU for weights and KV cache."""
        return int(self.gpu.memory_bytes * self.memory_fraction)

    @property
    def kv_bytes(self) -> int:
        """M_HBM of OasisKV Eq. 2: bytes of one GPU for the KV cache."""
        return self.static_bytes - self.weight_bytes

    @property
    def kv_token_bytes(self) -> int:
        """Bytes of K and V of one token in all layers on one rank."""
        return self.model.kv_token_bytes // self.model.kv_heads * self.model.kv_heads_of_rank(self.tp)

    @property
    def staging_bytes(self) -> int:
        """Device bytes of the prefill staging: two layers of the longest prompt."""
        return PrefillStaging.bytes_of(self.layout, self.layout.max_blocks)


def default_memory_fraction(gpu: Gpu, tp: int) -> float:
    """Return SGLang's default of --mem-fraction-static, without its small allowance for captured prefills.

    Read from sglang 0.5.23, `arg_groups/memory_hook.py`, which counts MiB of activations, metadata and captured steps.
    """
    memory = gpu.memory_bytes / MIB
    chunk, captured = _prefill_chunk_and_captured_batch(memory, tp)
    reserved = 512 + 1.5 * chunk + 128 * tp + 2 * captured
    if memory > 60 * 1024:
        reserved = max(reserved, 10 * 1024)
    return round((memory - reserved) / memory, 3)


def _prefill_chunk_and_captured_batch(memory: float, tp: int) -> tuple[int, int]:
    """Return SGLang's chunked_prefill_size and largest captured decode batch for a GPU with `memory` MiB."""
    few = tp < 4
    if memory < 20 * 1024:
        return 2048, 8
    if memory < 35 * 1024:
        return 4096, 48 if few else 160
    if memory < 60 * 1024:
        return 4096, 32 if few else 160
    if memory < 160 * 1024:
        return 8192, 256 if few else 512
    return 16384, 512


def dense_batch(kv_bytes: int, context: int, token_bytes: int) -> int:
    """Return B_max of OasisKV Eq. 2: how many requests of `context` tokens fit with their whole KV cache."""
    return kv_bytes // (context * token_bytes)


class RequestBytes(NamedTuple):
    """The bytes of one request on one rank, by tier.

    Attributes:
        host_kv, host_summaries: its pages in the host pool.
        resident: its blocks on the device.
        head_maps: which block is in which slot, its inverse, and when each was last selected.
        averages: average scores of its blocks.
        row_summaries: summaries of its blocks on the device.
    """

    host_kv: int
    host_summaries: int
    resident: int
    head_maps: int
    averages: int
    row_summaries: int

    @property
    def host(self) -> int:
        return self.host_kv + self.host_summaries

    @property
    def device(self) -> int:
        return self.resident + self.head_maps + self.averages + self.row_summaries


def request_bytes(layout: TierLayout, context: int) -> RequestBytes:
    """Return the bytes of a request of `context` tokens in a row of `layout`."""
    pages = -(-context // layout.block_size)
    kv = layout.num_layers * layout.kv_heads * layout.chunk_bytes
    slots = sum(layout.selected_blocks) + layout.num_layers * layout.local_slots
    resident = layout.kv_heads * slots * layout.chunk_bytes
    averages = layout.row_bytes - replace(layout, smoothed=False).row_bytes
    return RequestBytes(
        host_kv=pages * kv,
        host_summaries=pages * (layout.host_page_bytes - kv),
        resident=resident,
        head_maps=layout.row_bytes - resident - averages - layout.row_summary_bytes,
        averages=averages,
        row_summaries=layout.row_summary_bytes,
    )


class Capacity(NamedTuple):
    """How many requests can decode concurrently.

    Attributes:
        dense: with the whole KV cache on the device.
        lookahead: with lookahead KV, the smaller of the next two.
        device_rows: requests that the device can hold.
        host_requests: requests that the host can hold, None if the host memory was not given.
    """

    dense: int
    lookahead: int
    device_rows: int
    host_requests: int | None

    @property
    def bound(self) -> str:
        """The memory that limits lookahead KV."""
        return "host memory" if self.host_requests == self.lookahead < self.device_rows else "device memory"


def capacity_of(deployment: Deployment) -> Capacity:
    """Return the largest batches of a deployment.

    Raises:
        LookaheadKVError: not even one request fits.
    """
    layout = deployment.layout
    device_bytes = deployment.kv_bytes - deployment.staging_bytes
    if device_bytes < 2 * layout.row_bytes:
        raise LookaheadKVError(
            f"One request of {deployment.context} tokens and the padding row take {2 * layout.row_bytes / 1e9:.3f} GB "
            f"of each GPU, but weights and prefill staging leave only {max(0, device_bytes) / 1e9:.3f} GB: "
            f"raise --tp or --mem-fraction, or lower --budget or --context."
        )
    rows = layout.rows_in(device_bytes)
    dense = dense_batch(deployment.kv_bytes, deployment.context, deployment.kv_token_bytes)
    if deployment.host_bytes is None:
        return Capacity(dense, rows, rows, None)
    request = request_bytes(layout, deployment.context).host
    # SGLang keeps page 0 for padding.
    hosted = (deployment.host_bytes // deployment.tp - layout.host_page_bytes) // request
    if hosted < 1:
        least = gigabytes(deployment.tp * (request + layout.host_page_bytes))
        raise LookaheadKVError(
            f"--host-gb must be at least {least} for one request of {deployment.context} tokens, got "
            f"{deployment.host_bytes / 1e9:g}."
        )
    return Capacity(dense, min(rows, hosted), rows, hosted)


def host_bytes_for(deployment: Deployment, requests: int) -> int:
    """Return the host bytes that `requests` requests take on one rank, including the padding page."""
    layout = deployment.layout
    return requests * request_bytes(layout, deployment.context).host + layout.host_page_bytes


def gigabytes(size: int) -> str:
    """Return `size` bytes as gigabytes for a flag, rounded up."""
    return f"{(size // MEGABYTE + 1) / 1000:.3f}"
