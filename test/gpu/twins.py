"""The same requests on a device and, by the ops' references, on the CPU: from one state, a step leads both to the same.

Before every step the CPU takes over the device's state, so that what two ways of summing rank differently, a near tie,
does not spread; within a step it excuses one head.
"""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from typing import NamedTuple

import torch
from torch import Tensor

from sglang_oasis.config import LookaheadKVConfig, Speculation
from sglang_oasis.engine.attention import flashinfer, triton
from sglang_oasis.engine.attention.base import AttentionSetup, DeviceAttention
from sglang_oasis.engine.base import DecodeForward, EngineSetup
from sglang_oasis.engine.batch import DecodeBatch, PrefillBatch
from sglang_oasis.engine.device import DeviceEngine, DeviceSetup
from sglang_oasis.ops.streams import streams_of
from sglang_oasis.testing.graphs import captured
from sglang_oasis.tier.host_pool import HostPool
from sglang_oasis.tier.layout import TierLayout
from test.cases.places import CPU, Place, kernels_everywhere

NEAR_TIE = 2e-4
"""Relative difference below which scores may rank in either order."""
TOLERANCE = 3e-2
"""Of attention in bfloat16 on both sides."""


class LayerInputs(NamedTuple):
    """Of all layers, for t tokens.

    Attributes:
        queries: [layers, t, H*G, D].
        keys, values: [layers, t, H, D].
    """

    queries: Tensor
    keys: Tensor
    values: Tensor


class Sizes(NamedTuple):
    """Of the model and the tiers.

    Attributes:
        layers, heads, group, head_dim, block_size: of the model.
        budget: selected blocks.
        rows: S, padding included.
        context: tokens per row.
        drafts: m - 1.
    """

    layers: int = 4
    heads: int = 2
    group: int = 4
    head_dim: int = 64
    block_size: int = 16
    budget: int = 8
    rows: int = 5
    context: int = 1024
    drafts: int = 0

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5


def attention_on(place: Place, sizes: Sizes, layout: TierLayout, name: str) -> DeviceAttention:
    """ "flashinfer" or "triton"."""
    streams = streams_of(place.device)
    setup = AttentionSetup(layout, sizes.heads * sizes.group, layout.dtype, sizes.scale, place.device, streams)
    if name == "flashinfer":
        return flashinfer.make(setup)
    return triton.make(setup)


class Side:
    """One of the two.

    Args:
        place: where it runs.
        sizes: of everything.
        attention: name of what attends.
        kernels: entered while the ops run.
    """

    def __init__(self, place: Place, sizes: Sizes, attention: str, kernels: bool) -> None:
        self.place, self.sizes, self._kernels = place, sizes, kernels
        config = LookaheadKVConfig.from_flags(
            {
                "lookahead_kv_budget_tokens": sizes.budget * sizes.block_size,
                "lookahead_kv_sink_tokens": sizes.block_size,
                "lookahead_kv_fetch_ratio": 0.5,
                "lookahead_kv_smoothing": 0.8,
            },
            sizes.block_size,
            Speculation("NGRAM", sizes.drafts) if sizes.drafts else Speculation(),
        )
        layout = TierLayout.of(
            config, num_layers=sizes.layers, kv_heads=sizes.heads, head_dim=sizes.head_dim, dtype=torch.bfloat16,
            context_length=sizes.context, draft_tokens=sizes.drafts,
        )  # fmt: skip
        pages = 1 + (sizes.rows - 1) * layout.max_blocks
        self.host = HostPool(
            num_pages=pages, num_layers=sizes.layers, kv_heads=sizes.heads, block_size=sizes.block_size,
            head_dim=sizes.head_dim, dtype=torch.bfloat16, summary_format=layout.summary_format,
            allocate=place.allocate,
        )  # fmt: skip
        order = torch.zeros(sizes.rows, layout.max_blocks, dtype=torch.int64)  # row 0 is padding, as page 0
        order[1:] = 1 + torch.randperm(pages - 1, generator=torch.Generator().manual_seed(0)).view(sizes.rows - 1, -1)
        indices = order[:, :, None] * sizes.block_size + torch.arange(sizes.block_size)
        self.req_to_token = place.put(indices.flatten(1).int())
        cache_bytes = pages // 2 * sizes.layers * sizes.heads * layout.chunk_bytes
        self.engine = DeviceEngine(
            EngineSetup(config, layout, self.host, sizes.rows, self.req_to_token, [sizes.scale] * sizes.layers),
            DeviceSetup(
                place.device, sizes.heads * sizes.group, layout.dtype, cache_bytes,
                attention=attention_on(place, sizes, layout, attention),
            ),
        )  # fmt: skip

    def prefill(self, rows: list[int], prefixes: list[int], counts: list[int], inputs: LayerInputs) -> Tensor:
        """The last tokens of the rows' prompts: what all layers attend to, [layers, t, H*G, D]."""
        spans = zip(rows, prefixes, counts, strict=True)
        written = torch.cat([self.req_to_token[row, first : first + count] for row, first, count in spans]).long()
        forward = self.engine.begin_prefill(
            PrefillBatch(rows, [1] * len(rows), prefixes, counts, [True] * len(rows), written)
        )
        outs = [
            self.engine.prefill_layer(forward, layer, *each) for layer, each in enumerate(zip(*inputs, strict=True))
        ]
        self.engine.staging.join()
        return torch.stack(outs)

    def begin(self, rows: list[int], lengths: list[int], entries: int) -> DecodeForward:
        """Send a decode step to the device; no rows while a graph is captured."""
        decoding = torch.tensor(rows, dtype=torch.int64)
        batch = DecodeBatch(
            decoding, torch.ones_like(decoding), torch.tensor(lengths, dtype=torch.int64), 1 + self.sizes.drafts,
            entries=entries, real=bool(rows),
        )  # fmt: skip
        forward = self.engine.begin_decode(batch)
        assert not forward.plans[0].cold, "every row is prefilled before it decodes"
        return forward

    def running(self) -> AbstractContextManager[None]:
        """Within it, ops are those of the place."""
        return kernels_everywhere() if self._kernels else contextlib.nullcontext()

    def state(self) -> dict[str, list[Tensor]]:
        """All that a step reads or writes, per layer."""
        layers, pipeline = self.engine.tier.layers, self.engine.pipeline
        return {
            "head_map": [layer.head_map for layer in layers],
            "last_selected": [layer.last_selected for layer in layers],
            "slot_of": [layer.slot_of for layer in layers],
            "blocks": [layer.blocks for layer in layers],
            "summaries": [layer.summaries for layer in layers],
            "averages": [layer.averages for layer in layers if layer.averages is not None],
            "host_kv": self.host.kv,
            "host_summaries": self.host.summaries,
            "queries": list(pipeline._queries.values()),
            "counters": [pipeline.counters],
        }

    def copy_state(self) -> dict[str, list[Tensor]]:
        self.wait()
        return {name: [tensor.to("cpu", copy=True) for tensor in tensors] for name, tensors in self.state().items()}

    def restore(self, state: dict[str, list[Tensor]]) -> None:
        for name, tensors in self.state().items():
            for tensor, kept in zip(tensors, state[name], strict=True):
                tensor.copy_(kept)
        self.wait()

    def wait(self) -> None:
        """Until the device has done everything."""
        if self.place.device.type == "cuda":
            torch.cuda.synchronize(self.place.device)


class Graph:
    """A decode step of a fixed number of entries; on a GPU also captured, as SGLang does: with nothing but padding."""

    def __init__(self, side: Side, entries: int) -> None:
        sizes, self._side, self.entries = side.sizes, side, entries
        tokens = entries * (1 + sizes.drafts)
        self.indices = side.place.put(torch.zeros(tokens, dtype=torch.int64))
        self.inputs = side.place.put_all(random_inputs(sizes, tokens, torch.Generator().manual_seed(1)))
        self.outs: list[Tensor] = []
        with side.running():
            self.forward = side.begin([], [], entries)
            self.run()
            side.engine.settle()
            self.forward = side.begin([], [], entries)
            self.replay = captured(self.run, side.place.device)
            self._captured_outs = self.outs
            side.engine.settle()

    def run(self) -> None:
        engine = self._side.engine
        engine.start(self.forward, self.indices)
        self.outs = [
            engine.decode_layer(self.forward, layer, *each, self.indices)
            for layer, each in enumerate(zip(*self.inputs, strict=True))
        ]
        engine.end()

    def fill(self, indices: Tensor, inputs: LayerInputs) -> None:
        """The next step's tokens; those of padding go to page 0."""
        self.indices.zero_()
        self.indices[: len(indices)].copy_(indices)
        for mine, given in zip(self.inputs, inputs, strict=True):
            mine[:, : given.shape[1]].copy_(given)

    def eager(self) -> Tensor:
        """[layers, t, H*G, D], on the CPU."""
        with self._side.running():
            self.run()
        self._side.wait()
        return torch.stack(self.outs).cpu()

    def replayed(self) -> Tensor:
        """The same by the captured graph; on a CPU there is none."""
        with self._side.running():
            self.replay()
        self._side.wait()
        outs = self._captured_outs if self._side.place.device.type == "cuda" else self.outs
        return torch.stack(outs).cpu()


def random_inputs(sizes: Sizes, tokens: int, rng: torch.Generator) -> LayerInputs:
    def vectors(heads: int) -> Tensor:
        return torch.randn((sizes.layers, tokens, heads, sizes.head_dim), generator=rng).bfloat16()

    return LayerInputs(vectors(sizes.heads * sizes.group), vectors(sizes.heads), vectors(sizes.heads))


class Twins:
    """Both sides, and the requests that they serve.

    Args:
        place: of the device.
        sizes: of everything.
        attention: name of what attends on the device.

    Attributes:
        lengths: per live row, its committed tokens.
        excused, compared: heads of rows whose near ties were ranked otherwise, and all heads.
    """

    def __init__(self, place: Place, sizes: Sizes, attention: str) -> None:
        self.sizes = sizes
        self.device = Side(place, sizes, attention, kernels=True)
        self.mirror = Side(CPU, sizes, "triton", kernels=False)
        self.graphs: dict[tuple[Side, int], Graph] = {}
        self.lengths: dict[int, int] = {}
        self.excused = self.compared = 0
        self._rng = torch.Generator().manual_seed(5)

    def prefill(self, rows: list[int], counts: list[int]) -> None:
        """The next tokens of the rows' prompts."""
        prefixes = [self.lengths.get(row, 0) for row in rows]
        inputs = random_inputs(self.sizes, sum(counts), self._rng)
        with self.device.running():
            self.device.engine.settle()
        self.mirror.engine.settle()
        self.mirror.restore(self.device.copy_state())
        with self.device.running():
            out = self.device.prefill(rows, prefixes, counts, self.device.place.put_all(inputs))
        expected = self.mirror.prefill(rows, prefixes, counts, inputs)
        self.device.wait()
        torch.testing.assert_close(out.cpu(), expected, rtol=TOLERANCE, atol=TOLERANCE)
        for row, prefix, count in zip(rows, prefixes, counts, strict=True):
            self.lengths[row] = prefix + count
        self._compare(rows, names=("head_map", "slot_of", "averages", "host_kv"))

    def decode(self, rows: list[int], entries: int, accepted: int = 0) -> None:
        """A step of the rows in a batch of `entries`, of whose drafts so many are accepted."""
        for side in (self.device, self.mirror):
            if (side, entries) not in self.graphs:
                self.graphs[side, entries] = Graph(side, entries)
        lengths = [self.lengths[row] + 1 for row in rows]
        tokens = 1 + self.sizes.drafts
        inputs = random_inputs(self.sizes, len(rows) * tokens, self._rng)
        for side in (self.device, self.mirror):
            spans = zip(rows, lengths, strict=True)
            written = [side.req_to_token[row, length - 1 : length - 1 + tokens] for row, length in spans]
            with side.running():
                self.graphs[side, entries].forward = side.begin(rows, lengths, entries)
            self.graphs[side, entries].fill(torch.cat(written).long(), inputs)
        before = self.device.copy_state()
        eager = self.graphs[self.device, entries].eager()
        eagerly = self.device.copy_state()
        self.device.restore(before)
        out = self.graphs[self.device, entries].replayed()
        replayed = self.device.copy_state()
        live = len(rows) * tokens
        assert torch.equal(out[:, :live], eager[:, :live]), "a replay attends otherwise than an eager step"
        for name, tensors in without_padding(replayed).items():
            for layer, (got, wanted) in enumerate(zip(tensors, without_padding(eagerly)[name], strict=True)):
                assert same_bits(got, wanted), f"{name} of layer {layer} differs between a replay and an eager step"
        self.mirror.restore(before)
        expected = self.graphs[self.mirror, entries].eager()
        differ = self._compare(rows, names=tuple(before))
        for i, row in enumerate(rows):
            mine = slice(i * tokens, (i + 1) * tokens)
            for layer in range(self.sizes.layers):
                if not (differ[layer] & {(row, head) for head in range(self.sizes.heads)}):
                    torch.testing.assert_close(out[layer, mine], expected[layer, mine], rtol=TOLERANCE, atol=TOLERANCE)
            self.lengths[row] = lengths[i] + accepted

    def _compare(self, rows: list[int], names: tuple[str, ...]) -> list[set[tuple[int, int]]]:
        """Per layer, the (row, head) whose near ties were ranked otherwise."""
        got, wanted = without_padding(self.device.copy_state()), without_padding(self.mirror.state())
        excused: list[set[tuple[int, int]]] = []
        for layer in range(self.sizes.layers):
            torch.testing.assert_close(
                got["averages"][layer], wanted["averages"][layer], rtol=NEAR_TIE, atol=1e-6, equal_nan=True
            )
            differ = (got["head_map"][layer] != wanted["head_map"][layer]).any(-1)
            differ |= (got["last_selected"][layer] != wanted["last_selected"][layer]).any(-1)
            pairs = {(row + 1, head) for row, head in differ.nonzero().tolist()}
            for row, head in pairs:
                assert has_near_tie(wanted["averages"][layer][row - 1, head], self.sizes.budget), (
                    f"layer {layer}, row {row}, head {head}: other blocks are resident, and no scores are near ties"
                )
            excused.append(pairs)
            self.compared += len(rows) * self.sizes.heads
            self.excused += len(pairs)
            for name in set(names) & {"head_map", "last_selected", "slot_of", "blocks", "summaries"}:
                assert same_bits(got[name][layer][~differ], wanted[name][layer][~differ]), f"{name} of layer {layer}"
            for name in set(names) & {"host_kv", "host_summaries"}:
                assert same_bits(got[name][layer], wanted[name][layer]), f"{name} of layer {layer}"
        if "counters" in names and not any(excused):
            assert torch.equal(got["counters"][0], wanted["counters"][0])
        return excused


def has_near_tie(averages: Tensor, budget: int) -> bool:
    """Whether two neighbours among the `budget` + 1 best averages [N] are close."""
    finite = averages[averages.isfinite() & (averages >= 0)]
    best = finite.sort(descending=True).values[: budget + 1]
    return bool((best[1:] > best[:-1] * (1 - NEAR_TIE)).any())


def without_padding(state: dict[str, list[Tensor]]) -> dict[str, list[Tensor]]:
    """Without row 0 and page 0, in which padding entries write what they like, and without inputs."""
    whole = {"counters"}
    return {
        name: [tensor if name in whole else tensor[1:] for tensor in tensors]
        for name, tensors in state.items()
        if name != "queries"
    }


def same_bits(left: Tensor, right: Tensor) -> bool:
    return torch.equal(left.contiguous().view(torch.uint8), right.contiguous().view(torch.uint8))
