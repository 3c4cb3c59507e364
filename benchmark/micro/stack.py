"""A decoding model in this process: the product's engine between matrix products of the reference model's sizes.

Weights are random, so the queries for the selector are scripted: each row attends to one of a few topics, which changes
abruptly from time to time, and to a direction that drifts. The keys of a context's blocks belong to topics. A benchmark
can measure the cost of a step, and how blocks are fetched and evicted, without SGLang and without a text.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import rms_norm, silu

from sglang_oasis.config import AUTO, LookaheadKVConfig
from sglang_oasis.engine.base import EngineSetup
from sglang_oasis.engine.batch import DecodeBatch
from sglang_oasis.engine.host import HostEngine
from sglang_oasis.engine.plan import host_pages
from sglang_oasis.lookahead.startup import STARTUP_QUERIES
from sglang_oasis.tier.host_pool import HostPool
from sglang_oasis.tier.layout import TierLayout

BLOCK = 16
DTYPE = torch.bfloat16
TOPICS = 8
TOPIC_BLOCKS = 4
"""Number of neighbouring blocks with the same topic."""
TOPIC_STEPS = 40
"""Mean number of steps that a row stays with a topic."""
TOPIC_STRENGTH = 0.8
"""Length of the topic's part of a key or query, relative to the part that is random."""
DRIFT = 0.98
"""Correlation of the drifting part of a query with that of the previous step."""


@dataclass(frozen=True)
class Shape:
    """Sizes of the model and of the requests; by default those of SmolLM2-135M.

    Attributes:
        layers, kv_heads, group, head_dim, hidden, mlp, vocabulary: the model; `group` query heads share a KV head.
        batch: rows that decode.
        context: tokens of each row when decoding begins.
        budget: selected tokens per KV head and layer.
    """

    layers: int = 30
    kv_heads: int = 3
    group: int = 3
    head_dim: int = 64
    hidden: int = 576
    mlp: int = 1536
    vocabulary: int = 49152
    batch: int = 8
    context: int = 6144
    budget: int = 1024

    @property
    def query_heads(self) -> int:
        return self.kv_heads * self.group

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5


class Model:
    """All parts of a transformer except attention, with random weights on a device."""

    def __init__(self, shape: Shape, device: torch.device | None = None) -> None:
        self._shape, self._device = shape, device
        queries, keys = shape.query_heads * shape.head_dim, shape.kv_heads * shape.head_dim
        self._qkv = self._weights(shape.hidden, queries + 2 * keys)
        self._out = self._weights(queries, shape.hidden)
        self._gate_up = self._weights(shape.hidden, 2 * shape.mlp)
        self._down = self._weights(shape.mlp, shape.hidden)
        self._head = self._matrix(shape.hidden, shape.vocabulary)

    def _weights(self, rows: int, columns: int) -> list[Tensor]:
        return [self._matrix(rows, columns) for _ in range(self._shape.layers)]

    def _matrix(self, rows: int, columns: int) -> Tensor:
        return (torch.randn(rows, columns, device=self._device) * rows**-0.5).to(DTYPE)

    def key_value(self, layer: int, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Return K and V, [n, H, D] each, of `hidden` [n, hidden]; also computes queries, which are not used."""
        shape = self._shape
        qkv = _normed(hidden) @ self._qkv[layer]
        key, value = qkv[:, shape.query_heads * shape.head_dim :].chunk(2, dim=-1)
        heads = (shape.kv_heads, shape.head_dim)
        return key.unflatten(-1, heads), value.unflatten(-1, heads)

    def after_attention(self, layer: int, hidden: Tensor, attended: Tensor) -> Tensor:
        """Apply the output projection to `attended` [n, H*G, D], then the MLP: [n, hidden]."""
        hidden = hidden + attended.flatten(1) @ self._out[layer]
        gate, up = (_normed(hidden) @ self._gate_up[layer]).chunk(2, dim=-1)
        return hidden + (silu(gate) * up) @ self._down[layer]

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits [n, vocabulary]."""
        return _normed(hidden) @ self._head


def _normed(hidden: Tensor) -> Tensor:
    return rms_norm(hidden, hidden.shape[-1:])


class Workload:
    """Contexts in a host pool, and the queries of the steps that follow.

    Args:
        shape: the sizes.
        steps: most steps that a row decodes.
        layout: of the tiers, whose host pool this fills.

    Attributes:
        host: the pool; its completed pages have summaries.
        req_to_token: [n + 1, context + steps] int32 KV indices, row 0 is padding.
        queries: [STARTUP_QUERIES + steps, layers, n, H*G, D], the last ones of the prompt first.
    """

    def __init__(self, shape: Shape, steps: int, layout: TierLayout) -> None:
        blocks = -(-(shape.context + steps) // BLOCK)
        self.host = HostPool(
            num_pages=(shape.batch + 1) * blocks,
            num_layers=shape.layers,
            kv_heads=shape.kv_heads,
            block_size=BLOCK,
            head_dim=shape.head_dim,
            dtype=DTYPE,
            summary_format=layout.summary_format,
        )
        self.req_to_token = torch.arange((shape.batch + 1) * blocks * BLOCK, dtype=torch.int32).view(-1, blocks * BLOCK)
        directions = topic_directions(shape)
        self._fill(shape, directions)
        self.queries = scripted_queries(shape, steps, directions)

    def pages_of(self, row: int, blocks: int) -> Tensor:
        """Return the host pages of a row's first blocks: [blocks] int64."""
        return host_pages(self.req_to_token, row, blocks * BLOCK, BLOCK).long()

    def _fill(self, shape: Shape, directions: Tensor) -> None:
        """Fill the pool: keys from the topics [TOPICS, layers, H, D], random values, and summaries of all pages."""
        for pages in self.req_to_token[1:, : shape.context].view(shape.batch, -1, BLOCK)[..., 0].long() // BLOCK:
            topics = block_topics(len(pages))
            for layer, kv in enumerate(self.host.kv):
                kv[pages] = topic_pages(shape, topics, directions[:, layer])
                self.host.summarise(layer, pages)


def topic_directions(shape: Shape, device: torch.device | None = None) -> Tensor:
    """Return the directions of the keys and queries of each topic: [TOPICS, layers, H, D]."""
    return torch.randn(TOPICS, shape.layers, shape.kv_heads, shape.head_dim, device=device) * TOPIC_STRENGTH


def block_topics(blocks: int) -> Tensor:
    """Return the topic of each block of a context: [blocks] int64."""
    return torch.randint(TOPICS, (-(-blocks // TOPIC_BLOCKS),)).repeat_interleave(TOPIC_BLOCKS)[:blocks]


def topic_pages(shape: Shape, topics: Tensor, directions: Tensor) -> Tensor:
    """Return K and V [blocks, H, 2, B, D] of a layer: keys from the blocks' topics, random values.

    Args:
        shape: the sizes.
        topics: [blocks].
        directions: [TOPICS, H, D], the layer's.
    """
    device = directions.device
    vectors = torch.randn(len(topics), shape.kv_heads, 2, BLOCK, shape.head_dim, device=device)
    vectors[:, :, 0] += directions[topics.to(device), :, None]
    return vectors.to(DTYPE)


def scripted_queries(shape: Shape, steps: int, directions: Tensor) -> Tensor:
    """Return the queries that `Workload.queries` describes."""
    device = directions.device
    drifting = torch.randn(shape.layers, shape.batch, shape.query_heads, shape.head_dim, device=device)
    topics = torch.randint(TOPICS, (shape.batch,), device=device)
    queries = torch.empty((STARTUP_QUERIES + steps, *drifting.shape), dtype=DTYPE, device=device)
    for query in queries:
        switches = torch.rand(shape.batch, device=device) < 1 / TOPIC_STEPS
        topics = torch.where(switches, torch.randint(TOPICS, topics.shape, device=device), topics)
        drifting = DRIFT * drifting + (1 - DRIFT**2) ** 0.5 * torch.randn(drifting.shape, device=device)
        towards = directions[topics].transpose(0, 1).repeat_interleave(shape.group, dim=2)
        query.copy_(drifting + towards)
    return queries


def lay_out(shape: Shape, steps: int, ratio: float | None) -> tuple[LookaheadKVConfig, TierLayout]:
    """Return configuration and tier layout for `steps` steps at a fetch ratio, None for the adaptive cap."""
    flags = {"lookahead_kv_budget_tokens": shape.budget, "lookahead_kv_fetch_ratio": AUTO if ratio is None else ratio}
    config = LookaheadKVConfig.from_flags(flags, BLOCK)
    layout = TierLayout.of(
        config,
        num_layers=shape.layers,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        dtype=DTYPE,
        context_length=shape.context + steps,
    )
    return config, layout


class Decoder:
    """Decodes the workload with the host's engine.

    Args:
        shape: the sizes.
        model: what runs between the attention calls.
        workload: contexts and queries; decoders that share one take turns.
        config, layout: of the tiers.

    Attributes:
        engine: the product's; its audit may be changed between steps.
    """

    def __init__(
        self, shape: Shape, model: Model, workload: Workload, config: LookaheadKVConfig, layout: TierLayout
    ) -> None:
        self._shape, self._model, self._workload = shape, model, workload
        scales = [shape.scale] * shape.layers
        self.engine = HostEngine(
            EngineSetup(config, layout, workload.host, shape.batch + 1, workload.req_to_token, scales)
        )
        self._rows = torch.arange(1, shape.batch + 1)
        self._generation = self._decoded = 0

    @torch.inference_mode()
    def begin(self) -> None:
        """Fill all rows with new requests, whose prompts are the contexts."""
        shape, workload, engine = self._shape, self._workload, self.engine
        engine.settle()
        self._generation += 1
        self._decoded = 0
        window = engine.tier.window(shape.context)
        for row in self._rows.tolist():
            engine.tier.rows.claim(row, self._generation, shape.context)
            pages = engine.pages_of(row, window.open_block + 1)
            for layer in range(shape.layers):
                engine.build(layer, row, window, pages, workload.queries[:STARTUP_QUERIES, layer, row - 1])

    @torch.inference_mode()
    def step(self) -> None:
        """Decode one token of every row."""
        shape, engine = self._shape, self.engine
        length = shape.context + self._decoded + 1
        forward = engine.begin_decode(
            DecodeBatch(self._rows, torch.full_like(self._rows, self._generation), torch.full_like(self._rows, length))
        )
        written = self._workload.req_to_token[self._rows, length - 1].long()
        engine.start(forward, written)
        hidden = torch.randn(shape.batch, shape.hidden).to(DTYPE)
        for layer, query in enumerate(self._workload.queries[STARTUP_QUERIES + self._decoded]):
            key, value = self._model.key_value(layer, hidden)
            attended = engine.decode_layer(forward, layer, query, key, value, written)
            hidden = self._model.after_attention(layer, hidden, attended)
        engine.end()
        self._model.logits(hidden)
        self._decoded += 1

    def close(self) -> None:
        """End the background threads."""
        self.engine.close()
