"""Derives max_total_num_tokens from host memory, and max_running_requests from device memory.

Read from sglang 0.5.23: `mem_cache/kv_cache_configurator.KVCacheConfigurator._profile_available_bytes` (AROUND: the
byte budget of the KV pool) and `.resolve_max_num_reqs` (AFTER: an upper bound on the requests).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import psutil
import torch.distributed

from sglang_oasis.env import free_at_launch, note_free_at_launch
from sglang_oasis.errors import LookaheadKVError
from sglang_oasis.seams.dtypes import kv_dtype
from sglang_oasis.seams.flags import EAGLE3, config_of, enabled
from sglang_oasis.seams.launch_environment import ranks_per_host
from sglang_oasis.seams.seam import Seam
from sglang_oasis.serving.notes import device_budget
from sglang_oasis.tier.budget import divide_memory
from sglang_oasis.tier.host_memory.available import available_host_bytes
from sglang_oasis.tier.layout import TierLayout
from sglang_oasis.tier.prefill.staging import PrefillStaging

logger = logging.getLogger(__name__)


def layout_of_model(
    server_args: Any,
    model_config: Any,
    dtype: Any,
    tp_size: int,
    page_size: int,
    context_length: int | None = None,
) -> TierLayout:
    """Return the sizes of the tiers on one rank.

    Args:
        server_args: SGLang's arguments.
        model_config: SGLang's ModelConfig, of the target or of a draft model.
        dtype: torch dtype of the KV cache.
        tp_size: ranks that share the KV heads.
        page_size: tokens per page.
        context_length: most tokens of a request, None for what the model allows.
    """
    config = config_of(server_args, page_size)
    return TierLayout.of(
        config.of_draft_model() if model_config.is_draft_model else config,
        num_layers=model_config.num_attention_layers,
        kv_heads=model_config.get_num_kv_heads(tp_size),
        head_dim=model_config.head_dim,
        dtype=dtype,
        context_length=model_config.context_len if context_length is None else context_length,
        draft_tokens=config.draft_tokens,
    )


def layout_of_runner(runner: Any) -> TierLayout:
    """Return the sizes of the tiers of a model runner or of its KV cache configurator."""
    return _layout(runner, runner.model_config)


def draft_layout(configurator: Any) -> TierLayout | None:
    """Return the sizes of the draft model's tiers, given the target's configurator; None without a draft model."""
    draft = configurator.spec_aux_config.draft_model_config
    return None if draft is None else _layout(configurator, draft)


def draft_layout_of_flags(server_args: Any, model_config: Any, view: Any) -> TierLayout | None:
    """Return the sizes of the draft model's tiers before the models are loaded; None without a draft model.

    Args:
        server_args: SGLang's arguments.
        model_config: SGLang's ModelConfig of the target.
        view: the arguments as they are resolved.
    """
    path = view.speculative_draft_model_path
    if view.speculative_algorithm != EAGLE3 or path is None:
        return None
    draft = type(model_config).from_server_args(
        server_args, model_path=path, model_revision=view.speculative_draft_model_revision, is_draft_model=True
    )
    return layout_of_model(
        server_args,
        draft,
        kv_dtype(view, model_config.dtype),
        view.tp_size,
        view.page_size,
        model_config.context_len,
    )


def _layout(runner: Any, model_config: Any) -> TierLayout:
    from sglang.srt.runtime_context import get_parallel

    return layout_of_model(
        runner.server_args,
        model_config,
        runner.kv_cache_dtype,
        get_parallel().attn_tp_size,
        runner.page_size,
        runner.model_config.context_len,  # a draft model decodes at the target's positions
    )


def note_free_host_bytes() -> None:
    """Tell the processes to be started how much host memory is free before any of them runs."""
    note_free_at_launch(available_host_bytes())


def host_bytes_to_share(server_args: Any) -> int | None:
    """Return the host bytes that the ranks of this host divide; None for the bytes that are free now.

    Tensor-parallel ranks measure at the same time. Data-parallel replicas do not wait for each other: one may have
    loaded its weights or filled its pool when another measures. So each starts from the bytes that were free in the
    launcher, and subtracts from its share the memory that it has taken itself.
    """
    noted = free_at_launch()
    if server_args.dp_size == 1 or noted is None:
        return None
    own = psutil.Process().memory_info()
    return max(0, noted - ranks_per_host(server_args) * (own.rss - own.shared))


def _kv_bytes(original: Callable[..., int], configurator: Any, pre_model_load_memory: int) -> int:
    if not enabled(configurator.server_args) or configurator.is_draft_worker:
        return original(configurator, pre_model_load_memory)
    on_cpu = configurator.device == "cpu"
    layout = layout_of_runner(configurator)
    budget = divide_memory(
        config_of(configurator.server_args, configurator.page_size),
        ranks=ranks_per_host(configurator.server_args),
        free_device_bytes=None if on_cpu else original(configurator, pre_model_load_memory),
        free_host_bytes=host_bytes_to_share(configurator.server_args),
    )
    draft_layers = configurator.spec_aux_config.eagle_draft_num_layers or 0
    host_kv_bytes = bytes_to_divide(budget.host_bytes, layout, draft_layout(configurator), draft_layers)
    host_kv_bytes, device_bytes = _least_of_all_ranks(host_kv_bytes, budget.device_bytes)
    device_budget.set(device_bytes)
    return host_kv_bytes


def bytes_to_divide(host_bytes: int, layout: TierLayout, draft: TierLayout | None, counted_layers: int) -> int:
    """Return the bytes that SGLang must divide into KV indices, so that the resulting pages take `host_bytes`.

    SGLang does not count summaries, and counts a draft model's layers as if they were layers of the target.

    Args:
        host_bytes: bytes for the pages of both models, summaries included.
        layout, draft: sizes of both models' tiers.
        counted_layers: layers of the draft model that SGLang counts.
    """
    page = layout.num_layers * layout.kv_heads * layout.chunk_bytes
    if draft is None:
        return host_bytes * page // layout.host_page_bytes
    counted = page + page * counted_layers // layout.num_layers
    return host_bytes * counted // (layout.host_page_bytes + draft.host_page_bytes)


def _least_of_all_ranks(*sizes: int) -> list[int]:
    """Return the smallest of each size over the ranks, because their schedulers must all see the same capacity."""
    from sglang.srt.runtime_context import get_parallel

    least = torch.tensor(sizes)
    if get_parallel().launch_world_size > 1:
        group = get_parallel().world_group.cpu_group
        torch.distributed.all_reduce(least, op=torch.distributed.ReduceOp.MIN, group=group)
    return least.tolist()


def _cap_requests(result: int, configurator: Any, token_capacity: int) -> int:
    if not enabled(configurator.server_args) or configurator.is_draft_worker:
        return result
    device_bytes = device_budget.get()
    draft, layout = draft_layout(configurator), layout_of_runner(configurator)
    if configurator.device != "cpu":
        device_bytes -= staging_bytes(layout)
    rows = layout.rows_in(device_bytes, draft.row_bytes if draft else 0)
    if rows < result and configurator.server_args.max_running_requests is not None:
        logger.warning(
            "max_running_requests is %d instead of the requested %d: raise --lookahead-kv-device-gb.", rows, result
        )
    return min(result, rows)


def staging_bytes(layout: TierLayout) -> int:
    """Return the device bytes of the prefill staging buffers of a device whose KV cache is in host memory."""
    return PrefillStaging.bytes_of(layout, layout.max_blocks)


def leftover_device_bytes(layout: TierLayout, rows: int) -> int:
    """Return the bytes of the device budget that `rows` rows and the staging buffers do not use."""
    return max(0, device_budget.get() - rows * layout.row_bytes - staging_bytes(layout))


def check_host_bytes(layout: TierLayout, host_bytes: int, draft: TierLayout | None = None) -> None:
    """Refuse a host pool that cannot hold the pages of one request's working set, for both models.

    Raises:
        LookaheadKVError: the pool is too small; the message names its size and the least that works.
    """
    page_bytes = layout.host_page_bytes + (draft.host_page_bytes if draft else 0)
    least = (min(layout.selected_blocks) + layout.local_slots) * page_bytes
    if host_bytes < least:
        raise LookaheadKVError(
            f"{host_bytes / 1e9:.3f} GB of host memory are too little for the KV cache of one request, which needs "
            f"at least {least / 1e9:.3f} GB: raise --lookahead-kv-host-gb or free host memory."
        )


SEAMS = [
    Seam("mem_cache.kv_cache_configurator.KVCacheConfigurator._profile_available_bytes", _kv_bytes, "AROUND"),
    Seam("mem_cache.kv_cache_configurator.KVCacheConfigurator.resolve_max_num_reqs", _cap_requests, "AFTER"),
]
