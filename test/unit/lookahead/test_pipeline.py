"""The background pipeline: stages in order, layers overlapping, waiting that is local to a layer."""

from __future__ import annotations

import threading

import pytest

from sglang_oasis.lookahead.stages import Stage, StagePipeline

PATIENCE = 10.0


def test_a_task_passes_the_stages_in_order() -> None:
    pipeline = StagePipeline([Stage("double", lambda x: 2 * x), Stage("store", (seen := []).append)], num_layers=1)
    pipeline.submit(0, 21)
    pipeline.wait(0)
    assert seen == [42]
    assert pipeline.seconds.keys() == {"double", "store"}
    pipeline.close()


def test_stages_of_different_layers_overlap_and_the_caller_goes_on() -> None:
    """Layer 1 is predicted while layer 0 is being transferred, and neither blocks the caller."""
    predicted_second, both_seen = threading.Event(), []

    def predict(layer: int) -> int:
        if layer == 1:
            predicted_second.set()
        return layer

    def transfer(layer: int) -> None:
        if layer == 0:
            both_seen.append(predicted_second.wait(PATIENCE))

    pipeline = StagePipeline([Stage("predict", predict), Stage("transfer", transfer)], num_layers=2)
    pipeline.submit(0, 0)
    pipeline.submit(1, 1)
    pipeline.drain()
    assert both_seen == [True]
    pipeline.close()


def test_waiting_for_a_layer_does_not_wait_for_another() -> None:
    release = threading.Event()
    pipeline = StagePipeline(
        [Stage("predict", lambda layer: layer), Stage("transfer", lambda layer: layer == 0 or release.wait(PATIENCE))],
        num_layers=2,
    )
    pipeline.submit(0, 0)
    pipeline.submit(1, 1)
    pipeline.wait(0)
    assert not release.is_set()
    release.set()
    pipeline.wait(1)
    pipeline.close()


def test_a_blocked_wait_counts_as_a_stall_and_a_finished_task_does_not() -> None:
    release = threading.Event()
    pipeline = StagePipeline([Stage("transfer", lambda timer: timer and release.wait(PATIENCE))], num_layers=1)
    pipeline.submit(0, True)
    threading.Timer(0.05, release.set).start()
    pipeline.wait(0)
    assert pipeline.stalls == 1
    assert pipeline.stall_seconds > 0.01
    pipeline.submit(0, False)
    pipeline.close()
    pipeline.wait(0)
    assert pipeline.stalls == 1


def test_without_a_background_a_task_is_through_when_it_is_submitted() -> None:
    threads = []
    stage = Stage("transfer", lambda _: threads.append(threading.current_thread()))
    pipeline = StagePipeline([stage], num_layers=1, background=False)
    pipeline.submit(0, None)
    assert threads == [threading.current_thread()]
    pipeline.wait(0)
    pipeline.submit(0, None)
    assert pipeline.stalls == 0
    pipeline.close()


def test_an_error_in_a_stage_reaches_the_one_who_waits() -> None:
    def fail(_: int) -> None:
        raise ZeroDivisionError("in the background")

    pipeline = StagePipeline([Stage("predict", fail), Stage("transfer", lambda _: None)], num_layers=1)
    pipeline.submit(0, 1)
    with pytest.raises(ZeroDivisionError, match="in the background"):
        pipeline.wait(0)
    pipeline.wait(0)
    pipeline.close()


def test_a_layer_takes_no_second_task_before_the_first_was_waited_for() -> None:
    pipeline = StagePipeline([Stage("transfer", lambda _: None)], num_layers=1)
    pipeline.submit(0, 1)
    with pytest.raises(RuntimeError, match="not waited for"):
        pipeline.submit(0, 2)
    pipeline.close()
