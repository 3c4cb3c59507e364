"""Bytes of the tiers, their division and what a container allows."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from sglang_oasis.config import LookaheadKVConfig
from sglang_oasis.errors import LookaheadKVError
from sglang_oasis.tier import memory
from sglang_oasis.tier.budget import divide_memory
from sglang_oasis.tier.host_pool import HostPool
from sglang_oasis.tier.layout import TierLayout, fetch_cap
from sglang_oasis.tier.resident_tier import ResidentTier
from sglang_oasis.tier.window import Window


def layout(context_length: int = 1000, **flags: object) -> TierLayout:
    config = LookaheadKVConfig.from_flags({"lookahead_kv_budget_tokens": 128, **flags})
    return TierLayout.of(
        config, num_layers=3, kv_heads=2, head_dim=8, dtype=torch.float16, context_length=context_length
    )


def test_row_and_page_bytes_are_what_the_tensors_take() -> None:
    sizes = layout(lookahead_kv_dense_layers="2")
    rows, pages = 5, 7
    tier = ResidentTier(sizes, rows, torch.device("cpu"))
    allocated = sum(
        tensor.nbytes
        for layer in tier.layers
        for tensor in (layer.blocks, layer.head_map, layer.last_selected, layer.slot_of, layer.summaries)
    )
    assert allocated == rows * sizes.row_bytes
    host = HostPool(
        num_pages=pages, num_layers=3, kv_heads=2, block_size=16, head_dim=8, dtype=torch.float16, pin=False
    )
    assert host.nbytes == pages * sizes.host_page_bytes


def test_a_dense_layer_holds_every_block_and_others_the_budget() -> None:
    assert layout(lookahead_kv_dense_layers="1").selected_blocks == (8, 64, 8)


def test_a_budget_beyond_the_context_takes_no_more_than_the_context() -> None:
    assert layout(context_length=64).selected_blocks == (5, 5, 5)


def test_the_fetch_cap_is_at_least_one_block() -> None:
    assert [fetch_cap(0.05, 128), fetch_cap(0.05, 4), fetch_cap(1.0, 64)] == [6, 1, 64]


def test_step_bytes_count_only_layers_that_fetch() -> None:
    assert layout(lookahead_kv_fetch_ratio=0.5).step_bytes(0.5) == 3 * 4 * 2 * (2 * 16 * 8 * 2)
    assert layout(lookahead_kv_dense_layers="0,1,2").step_bytes(0.5) == 0


@pytest.mark.parametrize(
    ("length", "open_block", "fill", "first_local", "complete"),
    [(1, 0, 1, 0, 0), (16, 0, 16, 0, 1), (17, 1, 1, 0, 1), (33, 2, 1, 1, 2), (48, 2, 16, 1, 3), (49, 3, 1, 2, 3)],
)
def test_windows(length: int, open_block: int, fill: int, first_local: int, complete: int) -> None:
    window = Window(length, block_size=16, recent_blocks=1)
    assert (window.open_block, window.open_fill) == (open_block, fill)
    assert (window.first_local, window.complete_blocks) == (first_local, complete)


def divide(config: LookaheadKVConfig, free: int, device_is_host: bool, ranks: int = 1) -> tuple[int, int, int]:
    return divide_memory(
        config,
        layout(),
        device_is_host=device_is_host,
        ranks=ranks,
        free_device_bytes=lambda: 777,
        free_host_bytes=free,
    )


def test_automatic_budgets_share_what_is_free_between_the_ranks() -> None:
    host, kv, device = divide(LookaheadKVConfig(), 8000, device_is_host=True, ranks=2)
    assert (host, device) == (2000, 1000)
    assert kv == 2000 * 512 // (512 + 32)
    assert divide(LookaheadKVConfig(), 8000, device_is_host=False).device_bytes == 777


@pytest.mark.parametrize(("device_is_host", "free"), [(True, int(2.4e9)), (False, int(1.9e9))])
def test_more_memory_than_is_free_is_refused(device_is_host: bool, free: int) -> None:
    config = LookaheadKVConfig(host_gb=2.0, device_gb=0.5)
    with pytest.raises(LookaheadKVError, match="--lookahead-kv-host-gb"):
        divide(config, free, device_is_host)
    assert divide(config, int(2.6e9), device_is_host).host_bytes == int(2e9)


def test_device_memory_for_less_than_one_request_is_refused() -> None:
    sizes = layout()
    assert sizes.rows_in(2 * sizes.row_bytes) == 1
    with pytest.raises(LookaheadKVError, match="--lookahead-kv-device-gb"):
        sizes.rows_in(2 * sizes.row_bytes - 1)


def write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


@pytest.mark.parametrize(
    ("membership", "folder", "limit", "usage"),
    [
        ("0::/pod/box\n", "pod", "memory.max", "memory.current"),
        ("4:cpu:/pod\n3:memory:/pod/box\n", "memory/pod", "memory.limit_in_bytes", "memory.usage_in_bytes"),
    ],
)
def test_a_container_limit_of_any_ancestor_counts(
    tmp_path: Path, membership: str, folder: str, limit: str, usage: str
) -> None:
    write(tmp_path / "membership", membership)
    write(tmp_path / "fs" / folder / limit, "5000\n")
    write(tmp_path / "fs" / folder / usage, "1800\n")
    write(tmp_path / "fs" / folder / "box" / limit, "max\n")
    assert memory.available_host_bytes(tmp_path / "fs", tmp_path / "membership") == 3200


def test_without_a_container_the_machine_decides(tmp_path: Path) -> None:
    assert memory.available_host_bytes(tmp_path, tmp_path / "absent") > 1 << 20
