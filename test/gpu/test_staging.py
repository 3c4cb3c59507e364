"""Prefill staging with its kernels and side streams: buffers and host pages hold what the requests wrote."""

from __future__ import annotations

from test.cases.places import Place, kernels_everywhere
from test.cases.staging_cases import World, prefill_with_shared_pages


def test_passes_stage_what_the_host_pool_holds(place: Place, seed: int) -> None:
    with kernels_everywhere():
        prefill_with_shared_pages(World(cache_places=6, max_pages=8, seed=seed, place=place))


def test_passes_over_pages_that_the_cache_never_holds(place: Place, seed: int) -> None:
    with kernels_everywhere():
        prefill_with_shared_pages(World(cache_places=0, max_pages=8, seed=seed, place=place))
