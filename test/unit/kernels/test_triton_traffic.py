"""The bytes of `traffic.py` are those that the interpreted kernels touch, and are near the least possible."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from triton.runtime.interpreter import InterpreterBuilder

from scripts.kernel_reports import traffic
from scripts.kernel_reports.traffic import Traffic
from scripts.kernel_reports.workload import QWEN3_8B, Workload, launches_of
from sglang_oasis.kernels.triton.launches import Launch

SMALL = Workload(
    batch=2, heads=2, group=2, head_dim=32, block_size=8, selected=4, local=2, context=8 * 70, most=2, tokens=2,
    queries=2, dtype=torch.float32,
)  # fmt: skip
BUSY = [SMALL, SMALL._replace(summary="bf16", smoothed=False), SMALL._replace(summary="int8", dtype=torch.float16)]


def prepared(load: Workload, completing: bool) -> list[Launch]:
    """The launches with a step in their tensors that does all that the workload says."""
    n, heads, selected = load.batch, load.heads, load.selected
    launches = launches_of(load, "cpu")
    each = torch.arange(n)
    missing = load.selected + torch.arange(n * heads * load.most).view(n, heads, load.most)
    resident = torch.arange(selected - load.most).expand(n, heads, -1)
    contents: dict[str, Any] = {
        "rows": each + 1, "lengths": 100 + 100 * each, "graduates": -1, "completed": 3 if completing else -1,
        "expected": -1, "candidates": load.blocks, "number": 5, "cap": load.most + 1, "counters": 0,
        "indices": torch.arange(n * load.tokens), "keys": 1.0, "values": 1.0, "queries": 1.0, "query": 1.0,
        "summaries": 0, "averages": -1.0, "blocks": 1.0, "host_kv": 1.0, "kv": 1.0, "last_selected": 0,
        "head_map": torch.arange(selected).int(), "predicted": torch.cat([resident, missing], dim=-1),
        "admitted_blocks": missing, "admitted_slots": torch.arange(load.most), "sources": each, "targets": each,
        "slots": torch.arange(selected + load.local), "kv_lengths": (selected + load.local) * load.block_size,
        "query_starts": torch.arange(n + 1) * load.tokens,
    }  # fmt: skip
    for launch in launches:
        for name, tensor in launch.arguments.items():
            if name in contents and isinstance(tensor, torch.Tensor):
                tensor.copy_(torch.as_tensor(contents[name]))
        if "slot_of" in launch.arguments:
            launch.arguments["slot_of"].fill_(-1)[..., :selected] = torch.arange(selected)
        if "req_to_token" in launch.arguments:
            table = launch.arguments["req_to_token"]
            table.copy_(torch.arange(table.numel()).view(table.shape) % (n * load.context))
    return launches


def touched(launches: Sequence[Launch], monkeypatch: pytest.MonkeyPatch) -> tuple[int, int]:
    """Bytes at different addresses, per kernel and direction; bytes that were moved again."""
    different = all_ = 0
    accesses: dict[str, list[np.ndarray]] = {}

    def counting(name: str) -> None:
        original = getattr(InterpreterBuilder, name)

        def call(self: Any, pointers: Any, *rest: Any) -> Any:
            mask = rest[0] if name == "create_masked_load" else rest[1]
            size = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
            addresses = pointers.data[mask.data].reshape(-1).astype(np.int64)
            accesses.setdefault(name, []).append(addresses * 16 + size)
            return original(self, pointers, *rest)

        monkeypatch.setattr(InterpreterBuilder, name, call)

    for name in ("create_masked_load", "create_masked_store"):
        counting(name)
    for launch in launches:
        accesses.clear()
        launch.run()
        for made in map(np.concatenate, accesses.values()):
            different += int((np.unique(made) % 16).sum())
            all_ += int((made % 16).sum())
    monkeypatch.undo()
    return different, all_ - different


@pytest.mark.parametrize("load", BUSY, ids=lambda load: f"{load.summary}-{load.dtype}")
def test_the_kernels_touch_the_bytes_that_are_counted(load: Workload, monkeypatch: pytest.MonkeyPatch) -> None:
    for completing in (False, True):
        take, estimate, rank, *others = prepared(load, completing)
        expected = traffic.take_tokens(load, float(completing))
        assert touched([take], monkeypatch) == (expected.moved, expected.reread)
    expected = traffic.score_blocks(load)
    assert touched([estimate, rank], monkeypatch) == (expected.moved, expected.reread)
    for launch, op in zip(others, traffic.OPS[2:], strict=True):
        expected = op(load)
        assert (op.__name__, *touched([launch], monkeypatch)) == (op.__name__, expected.moved, expected.reread)


@pytest.mark.parametrize("op", traffic.OPS, ids=lambda op: op.__name__)
def test_no_kernel_moves_more_than_a_quarter_above_the_least(op: Any) -> None:
    assert 1 <= op(QWEN3_8B).ratio <= 1.25


def test_the_ratio_is_of_what_is_moved_to_the_floor() -> None:
    assert Traffic(floor=4, moved=5).ratio == 1.25


def test_the_documented_table_is_what_the_code_counts() -> None:
    documented = (Path(__file__).parents[3] / "docs" / "kernels.md").read_text()
    assert traffic.table(QWEN3_8B) in documented
