"""A decode step can be captured and races with nothing: walked on a device that has no memory to look into."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from sglang_oasis.lookahead.device_pipeline import PREDICT, TRANSFER
from test.unit.device_walk import LAYERS, Server, walking
from test.unit.recorded_streams import MAIN, Race, RecordedStreams

SERVED = pytest.mark.parametrize(
    ("flags", "drafts"),
    [
        ({}, 0),
        ({"lookahead_kv_smoothing": 0.0, "lookahead_kv_summary_dtype": "bf16"}, 0),
        ({"lookahead_kv_miss_policy": "fetch"}, 0),
        ({"lookahead_kv_dense_layers": "0,2"}, 0),
        ({"lookahead_kv_fetch_ratio": 1.0}, 3),
        ({"lookahead_kv_miss_policy": "fetch"}, 3),
    ],
    ids=["default", "unsmoothed", "fetch", "dense-layers", "drafts", "drafts-fetch"],
)
ATTENTION = pytest.mark.parametrize("flashinfer", [True, False], ids=["flashinfer", "triton"])


def serve(server: Server) -> None:
    """Prefill in chunks and groups, decode steps of several shapes, prefill in between, a row without resident set."""
    server.warm_up(ForwardMode.EXTEND, 1, 64)
    server.warm_up(ForwardMode.TARGET_VERIFY if server.drafts else ForwardMode.DECODE, 4, 4 * (1 + server.drafts))
    server.prefill([1, 2], [0, 0], [600, 40])
    server.decode([1, 2], [601, 41])
    server.decode([1, 2], [602, 42], entries=4)
    server.decode([1, 2], [605, 43], entries=4)
    server.prefill([3], [0], [512], last=False)
    server.decode([2], [44])
    server.prefill([3], [512], [300])
    server.decode([1, 2, 3], [606, 45, 813], entries=4)
    server.decode([1, 2, 3], [607, 46, 814], entries=4)


@SERVED
@ATTENTION
def test_nothing_waits_for_the_device_and_no_shape_depends_on_data(
    flags: dict[str, Any], drafts: int, flashinfer: bool
) -> None:
    with walking(RecordedStreams()) as walk:
        serve(Server(walk, flags, drafts, flashinfer))
    assert {"take_tokens", "fetch_blocks", "select_admissions"} <= {name for name, _ in walk.kernels}


@pytest.mark.parametrize(
    "waits", [lambda x: x.sum().item(), lambda x: x.nonzero(), lambda x: x[x > 0], lambda x: x.cpu()]
)
def test_the_device_of_these_tests_fails_on_whatever_waits(waits: Any) -> None:
    with walking(RecordedStreams()), pytest.raises((RuntimeError, NotImplementedError)):
        waits(torch.empty(4, device="meta"))


@pytest.mark.parametrize(
    "edge",
    [(MAIN, TRANSFER), (TRANSFER, PREDICT), (PREDICT, MAIN)],
    ids=lambda edge: " after ".join(edge),
)
def test_every_kind_of_wait_is_needed(edge: tuple[str, str]) -> None:
    with walking(RecordedStreams(ignored=edge)) as walk, pytest.raises(Race):
        serve(Server(walk, {}))


def test_predictions_and_transfers_run_beside_the_forward_pass() -> None:
    with walking(RecordedStreams()) as walk:
        server = Server(walk, {})
        server.prefill([1], [0], [600])
        server.decode([1], [601])
        walk.kernels.clear()
        server.decode([1], [602])
    streams = {name: {stream for kernel, stream in walk.kernels if kernel == name} for name, _ in walk.kernels}
    assert streams["take_tokens"] == streams["flashinfer"] == {MAIN}
    assert streams["estimate"] == streams["select_admissions"] == {PREDICT}
    assert streams["fetch_blocks"] == {TRANSFER}
    assert sum(kernel == "fetch_blocks" for kernel, _ in walk.kernels) == LAYERS


def test_flashinfer_plans_a_shape_once_while_its_rows_exceed_their_budget() -> None:
    with walking(RecordedStreams()) as walk:
        server = Server(walk, {})
        server.prefill([1, 2], [0, 0], [400, 500])
        for step in range(40):
            server.decode([1, 2], [401 + step, 501 + step])
        (planned,) = server.backend._attention.decode._planned.values()  # type: ignore[attr-defined]
    assert planned.wrapper.planned == 1
