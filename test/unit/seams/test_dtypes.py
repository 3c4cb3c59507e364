"""What `--dtype auto` becomes, from rates and memory that the tests give, and how the rates are found."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from sglang_oasis import product_rates
from sglang_oasis.errors import LookaheadKVError
from sglang_oasis.seams import dtypes
from sglang_oasis.seams.dtypes import SLOW, Decision, Room, decide, kv_dtype
from sglang_oasis.seams.launch_environment import parameters_in

AMPLE = Room(weights=10**9, free=10 * 10**9, asked=10**9)


def decided(rate: float, float32_rate: float, room: Room = AMPLE, dtype: torch.dtype = torch.bfloat16) -> Decision:
    return decide(dtype, (rate * 1e9, float32_rate * 1e9), room, "bfloat16")


@pytest.mark.parametrize(
    ("rate", "float32_rate"),
    [(8, 67), (21, 78), (36, 85), (SLOW * 100 - 1, 100)],
    ids=["AVX2 as measured", "AVX2 forced", "AVX-512 without bfloat16", "just below"],
)
def test_slow_products_are_computed_in_float32(rate: float, float32_rate: float) -> None:
    decision = decided(rate, float32_rate)
    assert decision.in_float32
    assert decision.sentence is not None
    assert f"at {rate:.0f} GFLOP/s per core, and float32 ones at {float32_rate}: " in decision.sentence
    assert "computes in float32 and keeps K and V in bfloat16" in decision.sentence


@pytest.mark.parametrize(("rate", "float32_rate"), [(205, 98), (150, 89), (2000, 100), (100, 100), (SLOW * 100, 100)])
def test_fast_products_change_nothing_and_nothing_is_said(rate: float, float32_rate: float) -> None:
    assert decided(rate, float32_rate) == Decision(False, None)


def test_the_sentence_names_the_dtype_of_the_checkpoint_and_that_of_the_cache() -> None:
    decision = decided(20, 80, dtype=torch.float16)
    assert decision.sentence is not None
    assert "multiplies float16 matrices" in decision.sentence
    assert "keeps K and V in bfloat16; to compute in float16, give --dtype float16." in decision.sentence


@pytest.mark.parametrize(
    ("room", "suffices"),
    [
        (Room(5 * 10**9, 10 * 10**9, 0), True),
        (Room(5 * 10**9 + 1, 10 * 10**9, 0), False),
        (Room(3 * 10**9, 10 * 10**9, 7 * 10**9), True),
        (Room(3 * 10**9 + 1, 10 * 10**9, 7 * 10**9), False),
        (Room(None, 10**9, 0), True),
    ],
    ids=["half of what is free", "more", "beside the tiers", "not beside the tiers", "not here yet"],
)
def test_float32_weights_must_leave_room_for_the_cache(room: Room, suffices: bool) -> None:
    decision = decided(8, 67, room)
    assert decision.in_float32 == suffices
    assert decision.sentence is not None
    assert ("are too much for the 10.0 GB that are free: --dtype auto computes in bfloat16" in decision.sentence) != (
        suffices
    )


def test_each_replica_has_weights_and_each_rank_tiers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_file({"a": torch.ones(3, 5)}, tmp_path / "1.safetensors")
    monkeypatch.setattr(dtypes, "available_host_bytes", lambda: 7 * 10**9)
    view = SimpleNamespace(
        model_path=str(tmp_path),
        speculative_draft_model_path=str(tmp_path),
        lookahead_kv_host_gb=0.5,
        lookahead_kv_device_gb="auto",
        tp_size=3,
        dp_size=2,
        nnodes=1,
    )
    assert dtypes._room(view) == Room(weights=2 * 2 * 15 * 4, free=7 * 10**9, asked=3 * 10**9)


@pytest.mark.parametrize(
    ("given", "expected"),
    [("auto", torch.float32), ("bf16", torch.bfloat16), ("bfloat16", torch.bfloat16), ("float16", torch.float16)],
)
def test_the_cache_has_the_dtype_of_the_computation_or_the_one_that_was_asked_for(
    given: str, expected: torch.dtype
) -> None:
    assert kv_dtype(SimpleNamespace(kv_cache_dtype=given), torch.float32) == expected


def test_parameters_are_counted_in_all_shards(tmp_path: Path) -> None:
    assert parameters_in(tmp_path) is None
    assert parameters_in(tmp_path / "organisation" / "model") is None
    save_file({"a": torch.ones(3, 5), "b": torch.ones(7, dtype=torch.bfloat16)}, tmp_path / "1.safetensors")
    save_file({"c": torch.tensor(1.0)}, tmp_path / "2.safetensors")
    assert parameters_in(tmp_path) == 23


def test_a_tensor_without_a_shape_is_damage(tmp_path: Path) -> None:
    header = b'{"a": {"dtype": "F32", "data_offsets": [0, 4]}}'
    (tmp_path / "1.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    with pytest.raises(LookaheadKVError, match="is damaged"):
        parameters_in(tmp_path)


class Clock:
    """Stands still but for the products, which take what the test says."""

    def __init__(self, seconds: Callable[[torch.dtype, int], float]) -> None:
        self.now = 0.0
        self.calls: dict[torch.dtype, int] = {}
        self._seconds = seconds

    def perf_counter(self) -> float:
        return self.now

    def multiply(self, vectors: torch.Tensor, matrix: torch.Tensor) -> None:
        assert torch.get_num_threads() == 1
        call = self.calls[vectors.dtype] = self.calls.get(vectors.dtype, -1) + 1
        self.now += self._seconds(vectors.dtype, call)


@pytest.fixture
def rates(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[torch.dtype, int], float]], list[float]]:
    def measure(seconds: Callable[[torch.dtype, int], float]) -> list[float]:
        clock = Clock(seconds)
        monkeypatch.setattr(product_rates, "time", clock)
        monkeypatch.setattr(torch.nn.functional, "linear", clock.multiply)
        found = product_rates.product_rates((torch.bfloat16, torch.float32))
        assert clock.calls[torch.bfloat16] == clock.calls[torch.float32] >= product_rates.LEAST_ROUNDS
        assert clock.now >= product_rates.LEAST_SECONDS
        return found

    return measure


def test_the_best_of_several_products_counts(rates: Callable[..., list[float]]) -> None:
    """All but one of each are disturbed, by another process or by the choice of a kernel."""
    operations, threads = 2 * 32 * 1024 * 1024, torch.get_num_threads()

    def seconds(dtype: torch.dtype, call: int) -> float:
        undisturbed = call == (2 if dtype == torch.float32 else 3)
        return (0.001 if dtype == torch.float32 else 0.004) * (1 if undisturbed else 30)

    assert rates(seconds) == pytest.approx([operations / 0.004, operations / 0.001])
    assert torch.get_num_threads() == threads


def test_fast_products_are_repeated_until_the_time_is_up(rates: Callable[..., list[float]]) -> None:
    assert rates(lambda dtype, call: 1e-4 if call > 50 else 1e-3)[0] == pytest.approx(2 * 32 * 1024 * 1024 / 1e-3), (
        "25 rounds of two"
    )


def test_this_machine_multiplies() -> None:
    assert all(1e8 < rate < 1e14 for rate in product_rates.product_rates((torch.bfloat16, torch.float32)))
