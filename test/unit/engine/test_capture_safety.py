"""A decode step can be captured and races with nothing: walked on a device that has no memory to look into."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.model_executor.runner.decode_cuda_graph_runner import build_replay_fb_view

from sglang_oasis.lookahead.pipelines.device import PREDICT, TRANSFER
from test.cases.device_walk import LAYERS, Server, walking
from test.cases.recorded_streams import MAIN, Race, RecordedStreams

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
KERNELS = pytest.mark.parametrize("libraries", [True, False], ids=["flashinfer-c++", "triton"])


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
@KERNELS
def test_nothing_waits_for_the_device_and_no_shape_depends_on_data(
    flags: dict[str, Any], drafts: int, libraries: bool
) -> None:
    with walking(RecordedStreams(), cplusplus=libraries) as walk:
        serve(Server(walk, flags, drafts, flashinfer=libraries))
    selects, attends = ("fused_select", "flashinfer") if libraries else ("select_admissions", "attend")
    assert {"take_tokens", "fetch_blocks", selects, attends} <= {name for name, _ in walk.kernels}


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
    assert streams["fused_select"] == {PREDICT}
    assert streams["fetch_blocks"] == {TRANSFER}
    assert sum(kernel == "fetch_blocks" for kernel, _ in walk.kernels) == LAYERS


def test_flashinfer_plans_a_shape_once_while_its_rows_exceed_their_budget() -> None:
    with walking(RecordedStreams()) as walk:
        server = Server(walk, {})
        server.prefill([1, 2], [0, 0], [400, 500])
        for step in range(40):
            server.decode([1, 2], [401 + step, 501 + step])
        (planned,) = server.engine._attention.decode._planned.values()  # type: ignore[attr-defined]
    assert planned.wrapper.planned == 1


def replay_view(server: Server, rows: Sequence[int], lengths: Sequence[int], entries: int) -> Any:
    """What SGLang hands over before it replays a graph of `entries` requests, made by SGLang itself."""
    seq_lens = torch.tensor([*lengths, *[1] * (entries - len(rows))])
    of_graph = SimpleNamespace(
        **dict.fromkeys(("input_ids", "positions", "out_cache_loc"), server.indices(entries)),
        req_pool_indices=server.indices(entries),
        seq_lens=server.indices(entries),
        seq_lens_cpu=seq_lens,
        encoder_lens=None,
        mamba_track_indices=None,
    )
    fields = dict.fromkeys(
        ("seq_lens_sum", "max_seq_len_host", "out_cache_loc_virtual", "kv_loc_plan", "kv_loc_cols", "spec_info",
         "max_seq_len_override", "lora_ids", "can_run_decode_cuda_graph")
    )  # fmt: skip
    batch = SimpleNamespace(
        forward_mode=ForwardMode.DECODE,
        seq_lens_cpu=seq_lens[: len(rows)],
        out_cache_loc=server.indices(len(rows)),
        **fields,
    )
    server.note_rows(rows)
    return build_replay_fb_view(
        forward_batch=batch, buffers=of_graph, bs=entries, raw_bs=len(rows), num_tokens=entries,
        global_num_tokens_cpu=None, seq_len_fill_value=server.backend.get_cuda_graph_seq_len_fill_value(),
        capture_forward_mode=ForwardMode.DECODE, is_encoder_decoder=False,
    )  # fmt: skip


def test_a_replay_prepares_the_batchs_own_rows_and_a_capture_none() -> None:
    with walking(RecordedStreams()) as walk:
        server = Server(walk, {})
        server.backend.init_cuda_graph_state(4, 4)
        server.warm_up(ForwardMode.DECODE, 4, 4, in_capture=True)
        engine = server.engine
        assert engine.counters.decode_steps == 0
        server.prefill([1, 2], [0, 0], [400, 40])
        with mock.patch.object(engine, "begin_decode", wraps=engine.begin_decode) as begin:
            server.backend.init_forward_metadata_out_graph(replay_view(server, [1, 2], [401, 41], entries=4))
        (batch,) = begin.call_args.args
        assert batch.rows.tolist() == [1, 2]
        assert batch.lengths.tolist() == [401, 41]
        assert len(batch.device_rows) == 2
        assert batch.entries == 4
        assert engine.counters.decode_steps == 1
        assert engine.tier.rows.length[[1, 2]].tolist() == [401, 41]
