"""No memory of prefill staging is overwritten while a reader may still use it, nor read before it is written."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sglang_oasis.ops.staging import PageCopies, TokenRuns
from sglang_oasis.tier.prefill import staging
from sglang_oasis.tier.prefill.plan import plan_pass
from sglang_oasis.tier.prefill.staging import FETCH, WRITE_BACK
from test.cases.recorded_streams import MAIN, Race, RecordedStreams
from test.cases.staging_cases import LAYERS, Request, World

TABLES = "tables of a pass"


def memory(tensor: Tensor) -> Hashable:
    return "tensor", tensor.data_ptr()


def host_pages(host_kv: Tensor, pages: Tensor) -> Iterator[Hashable]:
    return (("host", host_kv.data_ptr(), page) for page in pages.tolist())


class Recorded:
    """Runs passes in which every op only notes what it would touch."""

    def __init__(self, streams: RecordedStreams, max_pages: int) -> None:
        self.streams = streams
        self.world = World(rows=8, pages=80, max_pages=max_pages, cache_places=6, streams=streams)

    def __enter__(self) -> Recorded:
        ops = {
            "stage_pages": self._stage_pages,
            "store_tokens": self._store_tokens,
            "write_back": self._write_back,
            "plan_pass": self._plan_pass,
        }
        self._patch = mock.patch.multiple(staging, **ops)
        self._patch.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._patch.stop()

    def prefill(self, requests: list[Request], counts: list[int], layers: int = LAYERS) -> None:
        self.world.staging.begin(self.world.batch(requests, counts))
        for layer in range(layers):
            for staged in self.world.staging.layer(layer, *self.world.new_kv(requests, counts, layer)):
                self.streams.access(reads=[memory(staged.kv), TABLES])

    def decode(self) -> None:
        """A step that reads and writes any host page."""
        self.world.staging.join()
        for host_kv in self.world.host:
            self.streams.access(writes=host_pages(host_kv, torch.arange(len(host_kv))))

    def _plan_pass(self, *args: object) -> object:
        self.streams.access(writes=[TABLES])
        return plan_pass(*args)  # type: ignore[arg-type]

    def _stage_pages(self, kv: Tensor, arena: Tensor, host_kv: Tensor, copies: PageCopies) -> None:
        assert self.streams.current == FETCH
        self.streams.access([TABLES, *host_pages(host_kv, copies.pages)], [memory(kv), memory(arena)])

    def _store_tokens(self, kv: Tensor, rows: None, positions: Tensor, keys: Tensor, values: Tensor) -> None:
        assert self.streams.current == MAIN
        self.streams.access([TABLES], [memory(kv)])

    def _write_back(self, kv: Tensor, host_kv: Tensor, runs: TokenRuns) -> None:
        assert self.streams.current == WRITE_BACK
        self.streams.access([TABLES, memory(kv)], host_pages(host_kv, runs.pages))


def serve(recorded: Recorded, passes: list[tuple[list[int], int, bool]]) -> None:
    """Chunks of several requests, each pass perhaps stopped after some layers, perhaps followed by a decode step."""
    requests = [request for _ in range(3) if (request := recorded.world.admit())]
    for counts, layers, decodes in passes:
        given = [recorded.world.extend(request, count) for request, count in zip(requests, counts, strict=True)]
        recorded.prefill(requests, given, layers)
        if decodes:
            recorded.decode()


@settings(max_examples=60, deadline=None)
@given(
    passes=st.lists(
        st.tuples(
            st.lists(st.integers(0, 24), min_size=3, max_size=3),
            st.sampled_from([LAYERS, LAYERS, 0, 1]),
            st.booleans(),
        ),
        min_size=1,
        max_size=5,
    ),
    max_pages=st.sampled_from([8, 12, 24]),
)
def test_everything_that_conflicts_is_ordered(passes: list[tuple[list[int], int, bool]], max_pages: int) -> None:
    with Recorded(RecordedStreams(), max_pages) as recorded:
        serve(recorded, passes)


@pytest.mark.parametrize(
    "edge",
    [(FETCH, MAIN), (FETCH, WRITE_BACK), (MAIN, FETCH), (WRITE_BACK, MAIN), (MAIN, WRITE_BACK)],
    ids=lambda edge: "-".join(edge),
)
def test_every_kind_of_wait_is_needed(edge: tuple[str, str]) -> None:
    with Recorded(RecordedStreams(ignored=edge), max_pages=8) as recorded, pytest.raises(Race):
        serve(recorded, [([20, 20, 20], LAYERS, True)] * 3)


def test_the_next_turn_is_on_its_way_before_attention_of_this_one() -> None:
    streams = RecordedStreams()
    with Recorded(streams, max_pages=24) as recorded:
        request = recorded.world.admit()
        assert request is not None
        recorded.world.extend(request, 20)
        count = recorded.world.extend(request, 8)
        recorded.world.staging.begin(recorded.world.batch([request], [count]))
        with mock.patch.object(staging, "stage_pages") as fetch:
            next(recorded.world.staging.layer(0, *recorded.world.new_kv([request], [count], 0)))
        assert fetch.call_args.args[2] is recorded.world.host[1]
