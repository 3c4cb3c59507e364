"""The planner gives the papers' numbers where their constants do."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest

from benchmark.studies import papers
from sglang_oasis.planner.hardware import GPUS
from sglang_oasis.planner.sweep import SweepPoint


def worked(name: str) -> papers.Worked:
    return next(each for each in papers.worked_numbers() if each.name.startswith(name))


def test_a_request_of_32k_tokens_takes_8_6_gb_and_nine_fit_80_gb() -> None:
    assert round(worked("KV of a 32.7K").recomputed, 1) == 8.6
    assert worked("such requests").recomputed == 9


def test_a_step_hides_118_tokens_per_request_within_what_the_paper_rounds() -> None:
    # 64 GB/s and "about 17 ms"; 118 is 17.4 ms.
    hidden = worked("hidden").recomputed
    assert hidden == pytest.approx(118, rel=0.03)
    assert 118 / hidden * 17 == pytest.approx(17.4, abs=0.05)


def test_an_h100_holds_22_dense_requests_of_16k() -> None:
    assert worked("dense requests").recomputed == 22


def test_the_papers_sparse_requests_lie_below_ours_by_at_most_15_percent() -> None:
    # An upper bound: the draft model's weights and what the paper's prefill keeps on the GPU are not known.
    assert 95 <= worked("the same with the draft").recomputed <= 90 * 1.15


def test_a_terabyte_of_host_memory_holds_26_requests_of_qwen3_235b() -> None:
    assert round(worked("host requests").recomputed) == 26


@pytest.fixture(scope="module")
def hardware() -> list[SweepPoint]:
    return papers.ablation(papers_step=False)


@pytest.fixture(scope="module")
def measured_step() -> list[SweepPoint]:
    return papers.ablation(papers_step=True)


def rate(points: list[SweepPoint], ratio: float) -> float:
    return next(point.tokens_per_second for point in points if point.ratio == ratio)


def test_the_fetch_cap_moves_0_3_to_5_gb_per_step(hardware: list[SweepPoint]) -> None:
    assert hardware[0].fetch_bytes == pytest.approx(0.30e9, rel=0.01)
    assert hardware[-1].fetch_bytes == pytest.approx(5.05e9, rel=0.01)


def test_throughput_is_flat_until_the_link_is_full_and_then_falls_as_traffic_grows(hardware: list[SweepPoint]) -> None:
    link = GPUS["h100"].gather_bytes_per_second
    hidden = [point for point in hardware if point.stall_seconds < 1e-9]
    waiting = hardware[len(hidden) :]
    assert len(hidden) >= 2
    assert len(waiting) >= 3
    assert {round(point.tokens_per_second) for point in hidden} == {round(hidden[0].tokens_per_second)}
    for point in waiting:
        assert point.link_bytes_per_second == pytest.approx(link, rel=1e-3)
    for less, more in pairwise(waiting):
        assert more.tokens_per_second * more.fetch_bytes == pytest.approx(
            less.tokens_per_second * less.fetch_bytes, rel=1e-3
        )


def test_hardware_alone_gives_the_papers_rates_where_the_link_binds(hardware: list[SweepPoint]) -> None:
    assert rate(hardware, 1.0) == pytest.approx(824, rel=0.1)
    assert rate(hardware, 0.05) == pytest.approx(2083, rel=0.2)
    assert rate(hardware, 0.05) / rate(hardware, 1.0) == pytest.approx(2083 / 824, rel=0.12)


def test_with_the_papers_unhindered_step_throughput_falls_as_it_does_there(measured_step: list[SweepPoint]) -> None:
    assert rate(measured_step, 0.01) / rate(measured_step, 1.0) == pytest.approx(2.6, rel=0.07)
    assert rate(measured_step, 0.05) == pytest.approx(2083, rel=0.05)
    assert next(point.stall_seconds for point in measured_step if point.ratio == 0.1) > 0


def test_the_recomputed_numbers_can_be_printed_and_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "papers.json"
    papers.main(["--output-json", str(file)])
    assert "hardware alone" in capsys.readouterr().out
    record = json.loads(file.read_text())
    assert len(record["numbers"]) == len(papers.worked_numbers())
    assert set(record["ablation"]) == {"hardware alone", "the paper's unhindered step"}
