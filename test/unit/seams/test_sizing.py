"""Bytes of the tiers and their division."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
import torch

from sglang_oasis.config import LookaheadKVConfig
from sglang_oasis.env import FREE_AT_LAUNCH
from sglang_oasis.errors import LookaheadKVError
from sglang_oasis.seams import sizing
from sglang_oasis.seams.sizing import bytes_to_divide, check_host_bytes
from sglang_oasis.tier.budget import TierBudget, divide_memory
from sglang_oasis.tier.host_memory import available
from sglang_oasis.tier.host_pool import HostPool
from sglang_oasis.tier.layout import TierLayout, fetch_cap
from sglang_oasis.tier.resident_tier import ResidentTier
from sglang_oasis.tier.window import Window


def layout(context_length: int = 1000, **flags: object) -> TierLayout:
    config = LookaheadKVConfig.from_flags({"lookahead_kv_budget_tokens": 128, **flags})
    return TierLayout.of(
        config, num_layers=3, kv_heads=2, head_dim=8, dtype=torch.float16, context_length=context_length
    )


@pytest.mark.parametrize("smoothing", [0.0, 0.8])
def test_row_and_page_bytes_are_what_the_tensors_take(smoothing: float) -> None:
    sizes = layout(lookahead_kv_dense_layers="2", lookahead_kv_smoothing=smoothing)
    rows, pages = 5, 7
    tier = ResidentTier(sizes, rows, torch.device("cpu"))
    allocated = sum(
        tensor.nbytes
        for layer in tier.layers
        for tensor in (layer.blocks, *layer.maps, layer.summaries, layer.averages)
        if tensor is not None
    )
    assert allocated == rows * sizes.row_bytes
    host = HostPool(
        num_pages=pages,
        num_layers=3,
        kv_heads=2,
        block_size=16,
        head_dim=8,
        dtype=torch.float16,
        summary_format=sizes.summary_format,
    )
    assert host.nbytes == pages * sizes.host_page_bytes


def test_a_dense_layer_holds_every_block_and_others_the_budget() -> None:
    assert layout(lookahead_kv_dense_layers="1").selected_blocks == (8, 64, 8)


def test_a_budget_beyond_the_context_takes_no_more_than_the_context() -> None:
    assert layout(context_length=64).selected_blocks == (5, 5, 5)


def test_recent_tokens_beyond_the_context_take_no_more_than_the_context() -> None:
    assert layout(context_length=64, lookahead_kv_recent_tokens=10**30).recent_blocks == 5


def test_dense_layers_may_be_a_list() -> None:
    assert layout(lookahead_kv_dense_layers=[0, 2]).selected_blocks == (64, 8, 64)


def test_the_fetch_cap_is_at_least_one_block() -> None:
    assert [fetch_cap(0.05, 128), fetch_cap(0.05, 4), fetch_cap(1.0, 64)] == [6, 1, 64]


def test_step_bytes_count_only_layers_that_fetch() -> None:
    assert layout().step_bytes(4) == 3 * 4 * 2 * (2 * 16 * 8 * 2)
    assert layout(lookahead_kv_dense_layers="0,1,2").step_bytes(2) == 0


@pytest.mark.parametrize(
    ("length", "open_block", "fill", "first_local", "complete"),
    [(1, 0, 1, 0, 0), (16, 0, 16, 0, 1), (17, 1, 1, 0, 1), (33, 2, 1, 1, 2), (48, 2, 16, 1, 3), (49, 3, 1, 2, 3)],
)
def test_windows(length: int, open_block: int, fill: int, first_local: int, complete: int) -> None:
    window = Window(length, block_size=16, recent_blocks=1)
    assert (window.open_block, window.open_fill) == (open_block, fill)
    assert (window.first_local, window.complete_blocks) == (first_local, complete)


GB = 10**9


def divide(free: int, *, gpu: int | None = None, ranks: int = 1, **flags: float) -> TierBudget:
    config = LookaheadKVConfig.from_flags({f"lookahead_kv_{name}": value for name, value in flags.items()})
    return divide_memory(config, ranks=ranks, free_device_bytes=gpu, free_host_bytes=free)


def test_automatic_sizes_share_what_is_free_between_the_ranks() -> None:
    assert divide(8000, ranks=2) == (2000, 1000)
    assert divide(8000, gpu=777).device_bytes == 777


def test_an_automatic_size_gives_way_to_one_that_was_asked_for() -> None:
    assert divide(10_000_000_000, host_gb=8.0).device_bytes == 2_000_000_000
    assert divide(10_000_000_000, device_gb=7.0).host_bytes == 3_000_000_000


@pytest.mark.parametrize(
    ("free", "gpu", "flags"),
    [
        (2_400_000_000, None, {"host_gb": 2.0, "device_gb": 0.5}),
        (1_900_000_000, None, {"host_gb": 2.0}),
        (1_900_000_000, None, {"device_gb": 2.0}),
        (1_900_000_000, 10**12, {"host_gb": 2.0}),
        (10**12, 400_000_000, {"device_gb": 0.5}),
    ],
)
def test_more_memory_than_is_free_is_refused(free: int, gpu: int | None, flags: dict[str, float]) -> None:
    with pytest.raises(LookaheadKVError, match="that are free: lower it"):
        divide(free, gpu=gpu, **flags)


def test_device_memory_for_less_than_one_request_is_refused() -> None:
    sizes = layout()
    assert sizes.rows_in(2 * sizes.row_bytes) == 1
    with pytest.raises(LookaheadKVError, match="--lookahead-kv-device-gb"):
        sizes.rows_in(2 * sizes.row_bytes - 1)


def test_the_least_host_memory_does_not_depend_on_which_layer_is_dense() -> None:
    for dense in ("0", "1"):
        sizes = layout(lookahead_kv_dense_layers=dense)
        least = (8 + 2) * sizes.host_page_bytes
        check_host_bytes(sizes, least)
        with pytest.raises(LookaheadKVError, match="--lookahead-kv-host-gb"):
            check_host_bytes(sizes, least - 1)


def draft_layout() -> TierLayout:
    """One layer with other heads than the target's."""
    config = LookaheadKVConfig.from_flags({"lookahead_kv_budget_tokens": 128}).of_draft_model()
    return TierLayout.of(config, num_layers=1, kv_heads=6, head_dim=16, dtype=torch.float16, context_length=1000)


def test_the_host_pages_of_both_models_take_what_was_given() -> None:
    sizes, given = layout(), 1_000_000
    page = sizes.num_layers * sizes.kv_heads * sizes.chunk_bytes
    for draft, counted_layers in ((None, 0), (draft_layout(), 1)):
        # SGLang divides by the target's K and V of a page, times the layers of both models.
        counted = page + page * counted_layers // sizes.num_layers
        pages = bytes_to_divide(given, sizes, draft, counted_layers) // counted
        taken = sizes.host_page_bytes + (draft.host_page_bytes if draft else 0)
        assert pages == given // taken


def test_the_least_host_memory_counts_the_draft_models_pages() -> None:
    sizes = layout()
    least = (8 + 2) * (sizes.host_page_bytes + draft_layout().host_page_bytes)
    check_host_bytes(sizes, least, draft_layout())
    with pytest.raises(LookaheadKVError, match="--lookahead-kv-host-gb"):
        check_host_bytes(sizes, least - 1, draft_layout())


@pytest.mark.parametrize("free_now", [20 * GB, 2 * GB], ids=["the first to measure", "the last"])
def test_replicas_get_equal_shares_whoever_measures_first(monkeypatch: pytest.MonkeyPatch, free_now: int) -> None:
    """Each has 3 GB of weights; the last one to measure finds the weights and the pool of the other in memory."""
    weights = SimpleNamespace(rss=4 * GB, shared=1 * GB)
    monkeypatch.setattr(sizing.psutil, "Process", lambda: SimpleNamespace(memory_info=lambda: weights))
    monkeypatch.setenv(FREE_AT_LAUNCH, str(24 * GB))
    monkeypatch.setattr(available.psutil, "virtual_memory", lambda: SimpleNamespace(available=free_now))
    replicas = SimpleNamespace(dp_size=2, tp_size=1, nnodes=1)
    free = sizing.host_bytes_to_share(replicas)
    assert free is not None
    assert divide(free, ranks=2) == (int(9 * GB * 0.5), int(9 * GB * 0.25))
    assert sizing.host_bytes_to_share(SimpleNamespace(dp_size=1, tp_size=2, nnodes=1)) is None, "they measure together"


def test_the_launcher_notes_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FREE_AT_LAUNCH, "1")  # of an engine before this one
    monkeypatch.setattr(sizing, "available_host_bytes", lambda: 7 * GB)
    sizing.note_free_host_bytes()
    assert os.environ[FREE_AT_LAUNCH] == str(7 * GB)
