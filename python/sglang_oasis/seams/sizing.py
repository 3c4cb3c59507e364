"""max_total_num_tokens follows from host memory, max_running_requests from device memory.

Read from sglang 0.5.23: `mem_cache/kv_cache_configurator.KVCacheConfigurator._profile_available_bytes` (AROUND: the
byte budget of the KV pool) and `.resolve_max_num_reqs` (AFTER: an upper bound on the requests).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from sglang_oasis.errors import LookaheadKVError
from sglang_oasis.seams.catalogue import Seam
from sglang_oasis.seams.server_args import config_of, enabled
from sglang_oasis.tier.budget import divide_memory
from sglang_oasis.tier.layout import TierLayout

logger = logging.getLogger(__name__)


def layout_of_model(server_args: Any, model_config: Any, dtype: Any, tp_size: int, page_size: int) -> TierLayout:
    """Sizes of the tiers on one rank.

    Args:
        server_args: SGLang's arguments.
        model_config: SGLang's ModelConfig, of the target or of a draft model.
        dtype: torch dtype of the KV cache.
        tp_size: ranks that share the KV heads.
        page_size: tokens per page.
    """
    config = config_of(server_args, page_size)
    return TierLayout.of(
        config.of_draft_model() if model_config.is_draft_model else config,
        num_layers=model_config.num_attention_layers,
        kv_heads=model_config.get_num_kv_heads(tp_size),
        head_dim=model_config.head_dim,
        dtype=dtype,
        context_length=model_config.context_len,
        draft_tokens=config.draft_tokens,
    )


def layout_of_runner(runner: Any) -> TierLayout:
    """Sizes of the tiers of a model runner or of its KV cache configurator."""
    return _layout(runner, runner.model_config)


def draft_row_bytes(configurator: Any) -> int:
    """Device bytes that one request takes in the draft model's tiers, 0 without one."""
    draft = configurator.spec_aux_config.draft_model_config
    return 0 if draft is None else _layout(configurator, draft).row_bytes


def _layout(runner: Any, model_config: Any) -> TierLayout:
    from sglang.srt.runtime_context import get_parallel

    return layout_of_model(
        runner.server_args, model_config, runner.kv_cache_dtype, get_parallel().attn_tp_size, runner.page_size
    )


def ranks_per_host(server_args: Any) -> int:
    """Ranks that share the memory of one host."""
    return max(1, server_args.tp_size * server_args.dp_size // server_args.nnodes)


def _kv_bytes(original: Callable[..., int], configurator: Any, pre_model_load_memory: int) -> int:
    if not enabled(configurator.server_args) or configurator.is_draft_worker:
        return original(configurator, pre_model_load_memory)
    on_cpu = configurator.device == "cpu"
    budget = divide_memory(
        config_of(configurator.server_args, configurator.page_size),
        layout_of_runner(configurator),
        ranks=ranks_per_host(configurator.server_args),
        free_device_bytes=None if on_cpu else original(configurator, pre_model_load_memory),
    )
    host_kv_bytes, device_bytes = _least_of_all_ranks(budget.host_kv_bytes, budget.device_bytes)
    # The configurator has slots; its server_args are the one object that both hooks see.
    configurator.server_args._lookahead_kv_device_bytes = device_bytes
    return host_kv_bytes


def _least_of_all_ranks(*sizes: int) -> list[int]:
    """The smallest of each size over the ranks: their schedulers decide alone and must see the same capacity."""
    import torch.distributed
    from sglang.srt.runtime_context import get_parallel

    least = torch.tensor(sizes)
    if get_parallel().launch_world_size > 1:
        group = get_parallel().world_group.cpu_group
        torch.distributed.all_reduce(least, op=torch.distributed.ReduceOp.MIN, group=group)
    return least.tolist()


def _cap_requests(result: int, configurator: Any, token_capacity: int) -> int:
    if not enabled(configurator.server_args) or configurator.is_draft_worker:
        return result
    device_bytes = configurator.server_args._lookahead_kv_device_bytes
    rows = layout_of_runner(configurator).rows_in(device_bytes, draft_row_bytes(configurator))
    if rows < result and configurator.server_args.max_running_requests is not None:
        logger.warning(
            "max_running_requests is %d, not the requested %d: raise --lookahead-kv-device-gb for more.", rows, result
        )
    return min(result, rows)


def check_host_bytes(layout: TierLayout, host_bytes: int) -> None:
    """Refuse a host pool that cannot hold one request's working set.

    Raises:
        LookaheadKVError: names the size and the least that works.
    """
    least = (min(layout.selected_blocks) + layout.local_slots) * layout.host_page_bytes
    if host_bytes < least:
        raise LookaheadKVError(
            f"{host_bytes / 1e9:.3f} GB of host memory are too little for the KV cache of one request, which needs "
            f"at least {least / 1e9:.3f} GB: raise --lookahead-kv-host-gb or free host memory."
        )


SEAMS = [
    Seam("mem_cache.kv_cache_configurator.KVCacheConfigurator._profile_available_bytes", _kv_bytes, "AROUND"),
    Seam("mem_cache.kv_cache_configurator.KVCacheConfigurator.resolve_max_num_reqs", _cap_requests, "AFTER"),
]
