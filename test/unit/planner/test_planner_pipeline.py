"""The simulated pipeline obeys its bounds."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_oasis.planner.simulator import MEASURED_STEPS, LayerWork, Simulation, simulate

times = st.floats(0, 1e-3)
works = st.builds(LayerWork, times, times, times, times, times)
layer_counts = st.integers(1, 12)


def alone(layers: int, work: LayerWork, epilogue: float) -> float:
    """Seconds of a step on the device, if nothing ever waits."""
    return layers * (work.attention + work.rest + work.predict + work.select) + epilogue


@given(layer_counts, works, times)
@settings(max_examples=150, deadline=None)
def test_a_step_takes_at_least_its_slowest_resource_and_at_most_the_sum_of_all(
    layers: int, work: LayerWork, epilogue: float
) -> None:
    result = simulate(layers, work, epilogue)
    device, link = alone(layers, work, epilogue), layers * work.transfer
    backlog = layers * (work.predict + work.select + work.transfer)
    under_way = backlog / MEASURED_STEPS + 1e-9
    assert result.step_seconds >= max(device, link) - under_way
    assert result.step_seconds <= device + link + under_way
    assert result.link_seconds == pytest.approx(link, abs=under_way)


@given(layer_counts, works, times)
@settings(max_examples=100, deadline=None)
def test_the_forward_pass_computes_or_waits(layers: int, work: LayerWork, epilogue: float) -> None:
    result = simulate(layers, work._replace(predict=0.0, select=0.0), epilogue)
    computing = alone(layers, work._replace(predict=0.0, select=0.0), epilogue)
    assert result.step_seconds == pytest.approx(computing + result.stall_seconds, abs=1e-9)


@given(layer_counts, works, times, times)
@settings(max_examples=100, deadline=None)
def test_a_slower_link_never_makes_a_step_faster(layers: int, work: LayerWork, epilogue: float, more: float) -> None:
    slower = work._replace(transfer=work.transfer + more)
    under_way = layers * sum(slower[2:]) / MEASURED_STEPS + 1e-9
    assert simulate(layers, slower, epilogue).step_seconds >= simulate(layers, work, epilogue).step_seconds - under_way


def test_transfers_shorter_than_a_layer_are_hidden_and_longer_ones_are_not() -> None:
    work = LayerWork(attention=2.0, rest=3.0, predict=0.0, select=0.0, transfer=4.9)
    assert simulate(10, work, 0.0).step_seconds == pytest.approx(50)
    assert simulate(10, work, 0.0).stall_seconds == pytest.approx(0)
    assert simulate(10, work._replace(transfer=6.0), 0.0).step_seconds == pytest.approx(60)


def test_a_layer_waits_for_its_own_transfer_only() -> None:
    # The last layer's transfer begins when the step ends; were it waited for at once, a step would take 50 + 5.
    work = LayerWork(attention=0.0, rest=5.0, predict=0.0, select=0.0, transfer=5.0)
    assert simulate(10, work, 0.0).step_seconds == pytest.approx(50)


def test_one_layer_cannot_hide_what_comes_after_its_attention() -> None:
    work = LayerWork(attention=2.0, rest=3.0, predict=0.0, select=0.0, transfer=4.0)
    assert simulate(1, work, 0.0) == Simulation(pytest.approx(6), pytest.approx(1), pytest.approx(4))


def test_predict_and_select_take_their_share_of_the_device() -> None:
    work = LayerWork(attention=1.0, rest=1.0, predict=0.5, select=0.25, transfer=0.0)
    assert simulate(8, work, 0.0).step_seconds == pytest.approx(8 * 2.75)
