"""What the attention of the product relies on FlashInfer to do; the rehearsal has a stand-in for it."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from torch import Tensor

from sglang_oasis.engine.attention.base import AttentionSetup
from sglang_oasis.engine.attention.flashinfer import WORKSPACE_BYTES, FlashInferDecode, FlashInferPrefill
from sglang_oasis.engine.plan import DecodePlan
from sglang_oasis.engine.slot_tables import SlotTable
from sglang_oasis.lookahead.step import DecodeStep
from sglang_oasis.ops.attention import paged_attention
from sglang_oasis.ops.staging import PageCopies, TokenRuns
from sglang_oasis.ops.streams import streams_of
from sglang_oasis.ops.summary import SUMMARY_FORMATS
from sglang_oasis.testing.graphs import captured
from sglang_oasis.tier.layout import TierLayout
from sglang_oasis.tier.prefill.plan import PageTable, StagedGroup
from sglang_oasis.tier.window import Windows
from test.cases.kernel_cases import generator
from test.cases.places import Place

HEADS, GROUP, BLOCK, SELECTED, ROWS = 2, 4, 16, 8, 6
DTYPE, TOLERANCE = torch.bfloat16, 2e-2


@pytest.fixture(scope="module")
def flashinfer(place: Place) -> ModuleType:
    if place.device.type == "cpu":
        from test.gpu import flashinfer_stand_in

        return flashinfer_stand_in
    return pytest.importorskip("flashinfer", exc_type=ImportError)


@pytest.fixture(scope="module")
def workspace(place: Place) -> Tensor:
    return torch.zeros(WORKSPACE_BYTES if place.device.type == "cuda" else 1, dtype=torch.uint8, device=place.device)


def layout_of(head_dim: int, drafts: int) -> TierLayout:
    return TierLayout(
        num_layers=1, kv_heads=HEADS, head_dim=head_dim, dtype=DTYPE, block_size=BLOCK, selected_blocks=(SELECTED,),
        recent_blocks=1, sink_blocks=0, max_blocks=64, summary_format=SUMMARY_FORMATS["int4"], draft_tokens=drafts,
    )  # fmt: skip


def setup_of(layout: TierLayout, place: Place) -> AttentionSetup:
    return AttentionSetup(layout, HEADS * GROUP, DTYPE, layout.head_dim**-0.5, place.device, streams_of(place.device))


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("tokens", [1, 4])
def test_a_plan_serves_every_step_with_as_many_pages_and_one_graph_serves_all_plans(
    place: Place, flashinfer: ModuleType, workspace: Tensor, tokens: int, head_dim: int
) -> None:
    """The device alone tells the wrapper how full the last pages are."""
    rng, layout, plans = generator(tokens), layout_of(head_dim, tokens - 1), []

    class Counting(flashinfer.BatchDecodeWithPagedKVCacheWrapper):  # type: ignore[misc, name-defined]
        def plan(self, *args: object, **options: object) -> object:
            plans.append(args)
            return super().plan(*args, **options)

    decode = FlashInferDecode(setup_of(layout, place), workspace, Counting)
    shape = ROWS, HEADS, SELECTED + layout.local_slots, 2, BLOCK, head_dim
    blocks = torch.randn(shape, generator=rng).to(DTYPE)
    rows, entries = torch.tensor([4, 2, 5]), 4
    table = SlotTable(layout, SELECTED, place.put(torch.nn.functional.pad(rows, (0, ROWS - len(rows)))))
    query = place.put(torch.zeros(entries * tokens, HEADS * GROUP, head_dim, dtype=DTYPE))
    on_device, outs = place.put(blocks), []

    def step() -> None:
        decode.refresh(table, entries, tokens)
        outs[:] = [decode.run(query, on_device, table, entries)]

    replay = None
    for i, lengths in enumerate([[300, 290, 1], [301, 291, 2], [310, 295, 9], [330, 305, 40], [331, 306, 41]]):
        windows = Windows(torch.tensor(lengths), BLOCK, 1)
        empty = torch.empty(len(rows), 0, dtype=torch.int32)
        plan = DecodePlan(DecodeStep(i + 1, rows, windows, windows, empty, tokens), (), (), layout)
        table.load(plan)
        decode.plan(table, entries, tokens)
        if replay is None:
            step()
            replay = captured(step, place.device)
        asked = torch.randn((len(rows) * tokens, HEADS * GROUP, head_dim), generator=rng).to(DTYPE)
        query[: len(asked)] = place.put(asked)
        replay()
        expected = paged_attention.reference(asked.float(), blocks, *plan.resident(SELECTED), head_dim**-0.5)
        torch.testing.assert_close(outs[0][: len(asked)].cpu().float(), expected, rtol=TOLERANCE, atol=TOLERANCE)
    assert len(plans) < 5
    if tokens == 1:
        assert len(plans) == 2, "pages change once, with the fourth step"


@pytest.mark.parametrize("head_dim", [64, 128])
def test_prefill_attends_to_strided_halves_of_staged_pages(
    place: Place, flashinfer: ModuleType, workspace: Tensor, head_dim: int
) -> None:
    """Two requests, one of them with a prefix, over pages whose unused tokens are never read."""
    rng, prefixes, counts = generator(3), torch.tensor([37, 0]), torch.tensor([30, 50])
    lengths = prefixes + counts
    blocks = -(-lengths // BLOCK)
    indptr, starts = (torch.nn.functional.pad(part.cumsum(0), (1, 0)).int() for part in (blocks, counts))
    pages = int(indptr[-1])
    order = torch.randperm(pages + 3, generator=rng)[:pages].int()
    kv = torch.randn((pages + 3, HEADS, 2, BLOCK, head_dim), generator=rng).to(DTYPE)
    last = (lengths - 1) % BLOCK + 1
    none = torch.empty(0, dtype=torch.int32)
    slots = torch.nn.utils.rnn.pad_sequence(list(order.split(blocks.tolist())), batch_first=True)
    group = StagedGroup(
        requests=slice(0, 2), tokens=slice(0, int(starts[-1])), starts=indptr.tolist(), copies=PageCopies(*[none] * 4),
        positions=none, runs=TokenRuns(*[none] * 4), completed_places=none, completed_pages=none, slots=slots,
        kv_lengths=lengths.int(), query_starts=starts,
        pages=PageTable(indptr, place.put(order), last.int(), starts),
    )  # fmt: skip
    query = torch.randn((int(starts[-1]), HEADS * GROUP, head_dim), generator=rng).to(DTYPE)
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper
    prefill = FlashInferPrefill(setup_of(layout_of(head_dim, 0), place), workspace, wrapper)
    prefill.plan([group])
    out = prefill.run(place.put(query), place.put(kv), group)
    expected = paged_attention.reference(query.float(), kv, slots, slots, lengths.int(), starts, head_dim**-0.5)
    torch.testing.assert_close(out.cpu().float(), expected, rtol=TOLERANCE, atol=TOLERANCE)
