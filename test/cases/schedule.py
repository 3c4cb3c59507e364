"""A random schedule of requests against an engine: every invariant holds after every step, and a simple model agrees.

The model of a row is the list of its blocks per KV head, kept with Python lists and sets, independent of the tensors.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch import Tensor

from sglang_oasis.config import LookaheadKVConfig, Speculation
from sglang_oasis.engine.base import DecodeForward, Engine, EngineSetup
from sglang_oasis.engine.batch import DecodeBatch, PrefillBatch
from sglang_oasis.engine.host import HostEngine
from sglang_oasis.engine.plan import DecodePlan
from sglang_oasis.kernels.cpu import native
from sglang_oasis.lookahead.step import DecodeStep
from sglang_oasis.ops.smoothing import ESCAPE
from sglang_oasis.ops.summary import summarise_pages
from sglang_oasis.tier.host_pool import HostPool
from sglang_oasis.tier.layout import TierLayout, fetch_cap
from sglang_oasis.tier.resident_tier import ResidentTier

LAYERS, HEADS, DIM, BLOCK, ROWS = 2, 2, 16, 8, 4
CONTEXT = 20 * BLOCK
PAGES = 80
KV_DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])
"""Of both tiers; the model's keys, values and queries are float32."""
NEAR_TIE = 2e-4
"""Relative difference below which scores may rank in either order: the kernels' exponential has an error."""


SCALE = 0.5


def pad(vectors: Tensor, count: int) -> Tensor:
    """Vectors of a batch's tokens, and `count` of NaN, which must reach nothing, for those of entries that pad it."""
    return torch.cat([vectors, vectors.new_full((count, *vectors.shape[1:]), float("nan"))])


class FirstLayerIsPoor:
    """An audit that has found the recall of the first layer low, with which policy `auto` fetches what it misses."""

    def begin(self, step: DecodeStep) -> None: ...

    def observe(self, *arguments: object) -> None: ...

    def is_poor(self, layer: int) -> bool:
        return layer == 0

    def close(self) -> None: ...


@dataclass
class ModelRow:
    """A live request: its generation, its length, and per layer and head the set of resident selectable blocks.

    The length counts the tokens whose KV is final: a decode step writes the next one, and drafts behind it.
    """

    generation: int
    length: int
    resident: list[list[set[int]]]
    last_selected: list[list[dict[int, int]]]
    averages: list[list[dict[int, float]]]
    pages: list[int] = field(default_factory=list)


class Schedule(RuleBasedStateMachine):
    """Prefill, decode, abort and row reuse in random order."""

    source = "auto"
    kernels = True
    """Whether the C++ kernels run, or plain torch."""

    @initialize(
        budget_blocks=st.integers(2, 6),
        recent_tokens=st.sampled_from([0, 8, 16]),
        sinks=st.sampled_from([0, 8]),
        ratio=st.sampled_from([0.05, 0.5, 1.0]),
        policy=st.sampled_from(["drop", "fetch", "auto"]),
        dense=st.sampled_from(["", "1"]),
        drafts=st.sampled_from([0, 1, 4, 7]),
        smoothing=st.sampled_from([0.0, 0.8]),
        seed=st.integers(0, 10_000),
        kv_dtype=KV_DTYPES,
    )
    def start(
        self,
        budget_blocks: int,
        recent_tokens: int,
        sinks: int,
        ratio: float,
        policy: str,
        dense: str,
        drafts: int,
        smoothing: float,
        seed: int,
        kv_dtype: torch.dtype = torch.float32,
    ) -> None:
        if self.kernels:
            assert native.load() is not None
        else:
            native.unload()
        self.rng = torch.Generator().manual_seed(seed)
        self.config = LookaheadKVConfig.from_flags(
            {
                "lookahead_kv_budget_tokens": budget_blocks * BLOCK,
                "lookahead_kv_recent_tokens": max(recent_tokens, 1 if drafts else 0),
                "lookahead_kv_sink_tokens": sinks,
                "lookahead_kv_fetch_ratio": ratio,
                "lookahead_kv_miss_policy": policy,
                "lookahead_kv_smoothing": smoothing,
                "lookahead_kv_dense_layers": dense,
                "lookahead_kv_source": self.source,
                "lookahead_kv_selector": "minmax",
                "lookahead_kv_summary_dtype": "bf16",
            },
            BLOCK,
            Speculation("EAGLE3", drafts) if drafts else Speculation(),
        )
        self.layout = TierLayout.of(
            self.config,
            num_layers=LAYERS,
            kv_heads=HEADS,
            head_dim=DIM,
            dtype=kv_dtype,
            context_length=CONTEXT,
            draft_tokens=drafts,
        )
        self.host = HostPool(
            num_pages=PAGES,
            num_layers=LAYERS,
            kv_heads=HEADS,
            block_size=BLOCK,
            head_dim=DIM,
            dtype=kv_dtype,
            summary_format=self.layout.summary_format,
        )
        self.req_to_token = torch.zeros((ROWS, CONTEXT + 2 * BLOCK), dtype=torch.int32)
        self.setup = EngineSetup(self.config, self.layout, self.host, ROWS, self.req_to_token, [SCALE] * LAYERS)
        self.engine = self.make_engine(self.setup)
        self.engine.observer = self
        self.tier = self.engine.tier
        self.free_pages = list(range(1, PAGES))
        self.free_rows = list(range(1, ROWS))
        self.generations = [0] * ROWS
        self.live: dict[int, ModelRow] = {}

    def make_engine(self, setup: EngineSetup) -> Engine:
        engine = HostEngine(setup)
        if engine.audit is not None:
            engine.audit.close()
            engine.audit = FirstLayerIsPoor()  # type: ignore[assignment]
        return engine

    def random(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.rng)

    def extend_pages(self, row: int, request: ModelRow, length: int) -> None:
        while len(request.pages) * BLOCK < length:
            page = self.free_pages.pop()
            start = len(request.pages) * BLOCK
            self.req_to_token[row, start : start + BLOCK] = torch.arange(page * BLOCK, (page + 1) * BLOCK)
            request.pages.append(page)

    @precondition(lambda self: self.free_rows and len(self.free_pages) > 20)
    @rule(length=st.integers(1, 12 * BLOCK), chunks=st.integers(1, 3))
    def prefill(self, length: int, chunks: int) -> None:
        """A request arrives; its prompt is processed in chunks."""
        row = self.free_rows.pop()
        self.generations[row] += 1
        request = ModelRow(self.generations[row], length, [], [], [])
        self.extend_pages(row, request, length)
        bounds = sorted({0, length, *(length * i // chunks for i in range(1, chunks))})
        for prefix, end in itertools.pairwise(bounds):
            indices = self.req_to_token[row, prefix:end].long()
            forward = self.engine.begin_prefill(
                PrefillBatch([row], [request.generation], [prefix], [end - prefix], [end == length], indices)
            )
            for layer in range(LAYERS):
                keys, values = self.random(2, end - prefix, HEADS, DIM)
                query = self.random(end - prefix, 2 * HEADS, DIM)
                self.engine.prefill_layer(forward, layer, query, keys, values)
        self.live[row] = request
        self.adopt(row)

    def adopt(self, row: int) -> None:
        """Take over what the build selected; which blocks those are is checked in `test_selection.py`."""
        request = self.live[row]
        request.resident = [[set()] * HEADS for _ in range(LAYERS)]
        request.last_selected = [[{}] * HEADS for _ in range(LAYERS)]
        request.averages = [[self.averages_in(layer, row, head) for head in range(HEADS)] for layer in range(LAYERS)]
        for layer, head in itertools.product(range(LAYERS), range(HEADS)):
            self.adopt_head(layer, row, head)

    def averages_in(self, layer: int, row: int, head: int) -> dict[int, float]:
        """The tier's average score of each block that has one."""
        kept = self.tier.layers[layer].averages
        return {} if kept is None else {b: v for b, v in enumerate(kept[row, head].tolist()) if v >= 0}

    def adopt_head(self, layer: int, row: int, head: int) -> None:
        """Take over what the tier holds."""
        request, resident = self.live[row], self.tier.layers[layer]
        ages = dict(zip(resident.head_map[row, head].tolist(), resident.last_selected[row, head].tolist(), strict=True))
        ages.pop(-1, None)
        request.resident[layer][head], request.last_selected[layer][head] = set(ages), ages

    @precondition(lambda self: self.live and len(self.free_pages) > 2 * ROWS)
    @rule(data=st.data())
    def decode(self, data: st.DataObject) -> None:
        """Some of the live rows decode a token and drafts behind it, of which some are accepted."""
        rows = [row for row in self.live if self.live[row].length < CONTEXT and data.draw(st.booleans())]
        if rows:
            self.step(rows, [data.draw(st.integers(0, self.config.draft_tokens)) for _ in rows])

    def step(self, rows: list[int], accepted: list[int]) -> None:
        """The rows decode; so many of each row's drafts are accepted."""
        tokens = 1 + self.config.draft_tokens
        lengths = [self.live[row].length + 1 for row in rows]
        for row, length in zip(rows, lengths, strict=True):
            self.extend_pages(row, self.live[row], length + tokens - 1)
        position = torch.tensor(lengths)[:, None] - 1 + torch.arange(tokens)
        written = self.req_to_token[torch.tensor(rows)[:, None], position].flatten().long()
        queries = self.random(LAYERS, len(rows) * tokens, 2 * HEADS, DIM)
        forward = self.begin(rows, lengths, tokens, self.padding(len(rows)) + len(rows))
        assert not any(plan.cold for plan in forward.plans)
        padding = self.padding(len(rows)) * tokens
        indices = torch.nn.functional.pad(written, (0, padding))
        self.engine.start(forward, indices)
        self.passes = {id(plan): number for number, plan in enumerate(forward.plans)}
        for layer, query in enumerate(queries):
            self.decoding = rows, lengths, query
            keys, values = self.random(len(rows) * tokens, HEADS, DIM), self.random(len(rows) * tokens, HEADS, DIM)
            inputs = (pad(part, padding) for part in (query, keys, values))
            self.engine.decode_layer(forward, layer, *inputs, indices)
        self.engine.end()
        self.step_ends()
        if self.config.miss_policy != "fetch":
            for layer, query in enumerate(queries):
                cap = fetch_cap(self.config.fetch_ratio, self.layout.selected_blocks[layer])
                for row, length, vectors in zip(rows, lengths, query.unflatten(0, (-1, tokens)), strict=True):
                    looks_at = vectors[1:] if tokens > 1 else vectors
                    self.follow(layer, row, looks_at, length + 1, cap, forward.plans[0], urgent=False)
        for row, length, drafts in zip(rows, lengths, accepted, strict=True):
            self.live[row].length = min(length + drafts, CONTEXT)

    def begin(self, rows: list[int], lengths: list[int], tokens: int, entries: int) -> DecodeForward:
        generations = torch.tensor([self.live[row].generation for row in rows])
        return self.engine.begin_decode(
            DecodeBatch(torch.tensor(rows), generations, torch.tensor(lengths), tokens, entries=entries)
        )

    def padding(self, rows: int) -> int:
        """Entries that pad a batch of so many rows."""
        return 0

    def step_ends(self) -> None:
        self.engine.settle()

    def record(self, layer: int, plan: DecodePlan, tier: ResidentTier) -> None:
        """The engine is about to attend."""
        self.check_attended(layer, plan)
        if self.fetches(layer):
            (rows, lengths, query), number = self.decoding, self.passes[id(plan)]
            each = query[number :: len(self.passes)].unflatten(0, (len(rows), -1))
            for row, length, vectors in zip(rows, lengths, each, strict=True):
                budget = self.layout.selected_blocks[layer]
                self.follow(layer, row, vectors, length + number, budget, plan, urgent=True)

    def check_attended(self, layer: int, plan: DecodePlan) -> None:
        """The slots that attention reads hold exactly the resident and the local blocks, bit for bit."""
        selected, step = self.layout.selected_blocks[layer], plan.step
        for i, row in enumerate(step.rows.tolist()):
            request = self.live[row]
            window = self.tier.window(int(step.windows.length[i]))
            end = window.length + step.tokens - 1
            if window.first_local <= selected:
                left = set(range(int(step.before.first_local[i]), window.first_local))
                for blocks, ages in zip(request.resident[layer], request.last_selected[layer], strict=True):
                    ages.update(dict.fromkeys(left, 2 * step.number - 1))
                    blocks |= left
                    # With policy fetch a block may have made room for one that left the local slots with drafts that
                    # were rejected; it has just been loaded again, which `follow` will see.
                    assert self.fetches(layer) or blocks >= set(range(window.first_local))
            attended_tokens = int(plan.resident(selected).kv_lengths[i])
            slots = plan.resident(selected).slots[i, : -(-attended_tokens // BLOCK)].long()
            for head in range(HEADS):
                chunks = self.tier.layers[layer].blocks[row, head, slots]
                attended = chunks.transpose(1, 2).reshape(-1, 2, DIM)[:attended_tokens]
                local = range(window.first_local, (end - 1) // BLOCK + 1)
                if window.first_local <= selected:
                    blocks = set(range(window.first_local))
                elif not self.fetches(layer):
                    blocks = request.resident[layer][head]
                else:
                    blocks = set(self.tier.layers[layer].head_map[row, head].tolist())
                positions = [p for p in range(end) if p // BLOCK in blocks or p // BLOCK in local]
                tokens = self.req_to_token[row, positions]
                exact = self.host.read(layer, tokens)[:, head]
                assert sorted(map(tuple, attended.flatten(1).tolist())) == sorted(map(tuple, exact.flatten(1).tolist()))

    def fetches(self, layer: int) -> bool:
        """Whether misses are loaded before attention."""
        return self.config.miss_policy == "fetch" or (self.config.miss_policy == "auto" and layer == 0)

    def follow(
        self, layer: int, row: int, queries: Tensor, length: int, cap: int, plan: DecodePlan, *, urgent: bool
    ) -> None:
        """Capped eviction once more, on sets: compare with the head map."""
        number = 2 * plan.step.number + (not urgent)
        budget = self.layout.selected_blocks[layer]
        window = self.tier.window(length)
        candidates = window.first_local
        with_drafts = window.later(self.config.draft_tokens).first_local
        works = with_drafts if urgent else candidates
        if works <= budget or budget == self.layout.max_blocks:
            return
        request = self.live[row]
        for head in range(HEADS):
            keys = torch.stack([self.host.kv[layer][request.pages[b], head, 0] for b in range(candidates)]).float()
            low, high = keys.amin(1), keys.amax(1)
            midpoint, half_range = ((low + high) / 2).bfloat16().float(), ((high - low) / 2).bfloat16().float()
            group = queries.view(-1, HEADS, 2, DIM)[:, head].flatten(0, 1)
            bounds = (group @ midpoint.T + group.abs() @ half_range.T) * 0.5
            score = torch.softmax(bounds, -1).mean(0)
            if not urgent:
                score = self.smooth(request.averages[layer][head], score)
            score[: self.config.sink_blocks] = float("inf")
            best = score.sort(descending=True).values[: budget + 1]
            if (best[1:] > best[:-1] * (1 - NEAR_TIE)).any():
                self.adopt_head(layer, row, head)  # sums in another order may rank them otherwise
                continue
            ranking = sorted(range(candidates), key=lambda b: -float(score[b]))[:budget]
            resident, ages = request.resident[layer][head], request.last_selected[layer][head]
            missing = [b for b in ranking if b not in resident]
            for block in ranking:
                if block in resident:
                    ages[block] = number
            now = set(self.tier.layers[layer].head_map[row, head].tolist())
            admitted = set(missing[:cap])
            assert now - resident == admitted
            evicted = resident - now
            assert len(now) == budget
            assert not evicted & set(ranking)
            kept = resident & now - set(ranking)
            if evicted and kept:
                assert max(ages[b] for b in evicted) <= min(ages[b] for b in kept)
            for block in evicted:
                del ages[block]
            ages.update(dict.fromkeys(admitted, number))
            request.resident[layer][head] = now

    def smooth(self, averages: dict[int, float], score: Tensor) -> Tensor:
        """The scores that rank blocks ahead; what is fetched urgently is for this step alone."""
        decay = self.config.smoothing
        if not decay:
            return score
        for block, value in enumerate(score.tolist()):
            blended = decay * averages.get(block, value) + (1 - decay) * value
            averages[block] = max(blended, value / ESCAPE)
        return torch.tensor([averages[block] for block in range(len(score))])

    @precondition(lambda self: self.live)
    @rule(data=st.data(), silent=st.booleans())
    def finish(self, data: st.DataObject, silent: bool) -> None:
        """A request ends; the row may be reused without the tier hearing of it."""
        self.leave(data.draw(st.sampled_from(sorted(self.live))), silent)

    def leave(self, row: int, silent: bool) -> None:
        request = self.live.pop(row)
        for layer, page in itertools.product(range(LAYERS), request.pages[: request.length // BLOCK]):
            # Another request may find the page in the prefix cache.
            records = self.host.summaries[layer]
            expected = records.clone()
            summarise_pages.reference(self.host.kv[layer], torch.tensor([page]), self.layout.summary_format, expected)
            assert torch.equal(records[page], expected[page])
        self.free_pages.extend(request.pages)
        self.free_rows.append(row)
        if not silent:
            self.tier.rows.release(row)
        else:
            # The stale set must neither be found nor be checked against pages that belong to others now.
            assert not self.tier.rows.live(torch.tensor([row]), torch.tensor([request.generation + 1]))
            self.tier.rows.release(row)

    @invariant()
    def tiers_agree(self) -> None:
        if getattr(self, "tier", None) is None:
            return
        self.engine.check_integrity()
        assert set(self.tier.rows.occupied()) == set(self.live)

    def teardown(self) -> None:
        if getattr(self, "engine", None) is not None:
            self.engine.close()
        native.load()
