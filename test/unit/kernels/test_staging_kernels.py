"""The staging kernels, run by Triton's interpreter, equal their references."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sglang_oasis.kernels.triton import staging as kernels
from sglang_oasis.ops import staging as faces
from sglang_oasis.ops.staging import PageCopies, TokenRuns
from sglang_oasis.ops.tokens import store_tokens
from sglang_oasis.tier.prefill import page_cache, staging
from test.cases.kernel_cases import BLOCK_SIZES, DTYPES, SEEDS, generator
from test.cases.staging_cases import World, prefill_with_shared_pages

ARCHITECTURES = (80, 90, 100)
HEAD_DIMS = st.sampled_from([16, 64, 80, 96, 128])
FEW = settings(max_examples=25, deadline=None)  # the interpreter is slow


def bits(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8)


class Pages:
    """A staging buffer, a cache and a host pool; what nobody wrote is NaN."""

    def __init__(self, heads: int, block_size: int, head_dim: int, dtype: torch.dtype, rng: torch.Generator) -> None:
        def pages(count: int) -> Tensor:
            return torch.randn((count, heads, 2, block_size, head_dim), generator=rng).to(dtype)

        self.staging, self.arena, self.host = torch.full_like(pages(9), float("nan")), pages(5), pages(12)
        self.arena[3:] = float("nan")

    def copy(self) -> Pages:
        twin = object.__new__(Pages)
        twin.staging, twin.arena, twin.host = self.staging.clone(), self.arena.clone(), self.host.clone()
        return twin

    def same(self, other: Pages) -> bool:
        return all(torch.equal(bits(mine), bits(theirs)) for mine, theirs in zip(self.all(), other.all(), strict=True))

    def all(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.staging, self.arena, self.host


PAGES = st.builds(Pages, st.integers(1, 3), BLOCK_SIZES, HEAD_DIMS, DTYPES, SEEDS.map(generator))


def int32(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


@FEW
@given(pages=PAGES, count=st.integers(0, 6), data=st.data(), seed=SEEDS)
def test_pages_come_from_where_they_are_and_stay_where_they_should(
    pages: Pages, count: int, data: st.DataObject, seed: int
) -> None:
    rng = generator(seed)
    wanted = [data.draw(st.integers(-1, 11)) for _ in range(count)]
    sources = [data.draw(st.sampled_from(["cache", "host", "host, kept"])) for _ in range(count)]
    free = [3, 4]
    hits = [data.draw(st.integers(0, 2)) if source == "cache" else -1 for source in sources]
    fills = [free.pop() if source == "host, kept" and free else -1 for source in sources]
    targets = torch.randperm(9, generator=rng)[:count].tolist()
    copies = PageCopies(*map(int32, (wanted, targets, hits, fills)))
    expected = pages.copy()
    faces.stage_pages.reference(*expected.all(), copies)
    kernels.stage_pages(*pages.all(), copies)
    assert pages.same(expected)
    for page, target, hit in zip(wanted, targets, hits, strict=True):
        if page >= 0:
            source = pages.arena[hit] if hit >= 0 else pages.host[page]
            assert torch.equal(bits(pages.staging[target]), bits(source))


@FEW
@given(pages=PAGES, count=st.integers(0, 6), data=st.data(), seed=SEEDS)
def test_new_tokens_reach_their_host_pages_and_nothing_else_changes(
    pages: Pages, count: int, data: st.DataObject, seed: int
) -> None:
    rng, block_size = generator(seed), pages.host.shape[-2]
    spans = [sorted(data.draw(st.tuples(*[st.integers(0, block_size)] * 2))) for _ in range(count)]
    places, targets = (torch.randperm(n, generator=rng)[:count].tolist() for n in (9, 12))
    pages.staging.copy_(torch.randn(pages.staging.shape, generator=rng))
    runs = TokenRuns(*map(int32, (places, targets, [first for first, _ in spans], [last for _, last in spans])))
    expected = pages.copy()
    for place, target, (first, last) in zip(places, targets, spans, strict=True):
        expected.host[target, :, :, first:last] = expected.staging[place, :, :, first:last]
    by_reference = pages.copy()
    faces.write_back.reference(by_reference.staging, by_reference.host, runs)
    kernels.write_back(pages.staging, pages.host, runs)
    assert by_reference.same(expected)
    assert pages.same(expected)


@FEW
@given(pages=PAGES, tokens=st.integers(0, 12), dtype=DTYPES, group=st.integers(0, 3), seed=SEEDS)
def test_tokens_are_stored_from_any_strides_in_the_type_of_the_pages(
    pages: Pages, tokens: int, dtype: torch.dtype, group: int, seed: int
) -> None:
    rng = generator(seed)
    _, heads, _, block_size, head_dim = pages.staging.shape
    projected = torch.randn((tokens, (group + 2) * heads, head_dim), generator=rng).to(dtype)
    keys, values = projected[:, group * heads : (group + 1) * heads], projected[:, (group + 1) * heads :]
    positions = torch.randperm(9 * block_size, generator=rng)[:tokens]
    expected = pages.copy()
    store_tokens.reference(expected.staging, None, positions, keys, values)
    kernels.store_into_pages(pages.staging, None, positions, keys, values)
    assert pages.same(expected)


@FEW
@given(
    places=st.integers(0, 9),
    indices=st.lists(st.integers(-1, 200), max_size=600),
    block_size=BLOCK_SIZES,
    seed=SEEDS,
)
def test_written_pages_are_forgotten_and_no_others(places: int, indices: list[int], block_size: int, seed: int) -> None:
    tags = torch.arange(places, dtype=torch.int32)
    tags += places * torch.randint(-1, 3, (places,), generator=generator(seed), dtype=torch.int32)
    tags.clamp_(min=-1)
    written = {index // block_size for index in indices if index >= 0}
    expected = [-1 if tag in written else tag for tag in tags.tolist()]
    for forget in (faces.forget_pages.reference, kernels.forget_pages):
        found = tags.clone()
        forget(found, torch.tensor(indices, dtype=torch.int64), block_size)
        assert found.tolist() == expected


def test_tensors_that_the_kernels_cannot_walk_are_refused() -> None:
    pages = torch.zeros((4, 2, 2, 8, 16))
    with pytest.raises(ValueError, match=r"Pages must be contiguous, got strides"):
        kernels.write_back(pages.transpose(0, 1), pages, TokenRuns(*[int32([0])] * 4))
    flat = torch.zeros((1, 16, 2)).transpose(1, 2)
    with pytest.raises(ValueError, match="keys and values must be contiguous, got strides 2 and 2"):
        kernels.store_into_pages(pages, None, torch.tensor([0]), flat, flat)


def test_passes_through_the_kernels_stage_what_the_host_pool_holds() -> None:
    ops = {
        "stage_pages": kernels.stage_pages,
        "store_tokens": kernels.store_into_pages,
        "write_back": kernels.write_back,
    }
    with mock.patch.multiple(staging, **ops), mock.patch.object(page_cache, "forget_pages", kernels.forget_pages):
        prefill_with_shared_pages(World(cache_places=6, max_pages=8))
