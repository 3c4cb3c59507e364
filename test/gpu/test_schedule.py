"""A decode step in a CUDA graph, side streams inside, does what the references do one after another on a CPU."""

from __future__ import annotations

import importlib.util

import pytest

from test.cases.places import Place
from test.gpu.twins import Sizes, Twins

ATTENTION = pytest.mark.parametrize(
    "attention",
    [
        "triton",
        pytest.param(
            "flashinfer",
            marks=pytest.mark.skipif(importlib.util.find_spec("flashinfer") is None, reason="FlashInfer is absent"),
        ),
    ],
)


@ATTENTION
@pytest.mark.parametrize("drafts", [0, 3])
def test_replays_equal_eager_steps_and_the_references(
    place: Place, attention: str, drafts: int, request: pytest.FixtureRequest
) -> None:
    """Chunks, rows below and above their budget, padded batches, blocks that complete and graduate, prefill between."""
    tiny = request.config.getoption("--tiny")
    if tiny and not drafts:
        pytest.skip("a rehearsal has steps with drafts only")
    sizes = Sizes(drafts=drafts)
    if tiny:
        sizes = sizes._replace(layers=2, budget=3, block_size=8, head_dim=16, context=160, rows=4)
    unit = sizes.block_size
    twins = Twins(place, sizes, attention)
    twins.prefill([1, 2], [10 * unit + 5, 2 * unit])
    twins.prefill([1], [3 * unit])
    for _ in range(1 if tiny else 6):
        twins.decode([1, 2], entries=2)
    twins.prefill([3], [9 * unit])
    for step in range(2 if tiny else 2 * unit + 2):
        twins.decode([3, 1, 2], entries=4, accepted=step % (1 + drafts))
    for _ in range(1 if tiny else 2):
        twins.decode([2], entries=2)
    assert int(twins.device.engine.pipeline.counters[1, 0]) > 0, "nothing was fetched"
    assert twins.excused <= 0.02 * twins.compared
