"""Walks SGLang's backend for CUDA on tensors without memory: whatever looks into one, to wait or to decide, fails.

Every op and every kernel launch is noted with the stream it is on and with what it reads and writes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Iterable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sglang_oasis.config import LookaheadKVConfig, Speculation
from sglang_oasis.engine.attention.base import AttentionSetup, DeviceAttention
from sglang_oasis.engine.attention.flashinfer import FlashInferDecode, FlashInferPrefill
from sglang_oasis.engine.base import EngineSetup
from sglang_oasis.engine.device import DeviceEngine, DeviceSetup
from sglang_oasis.kernels.triton.launches import Launch
from sglang_oasis.serving.lookahead_backend import LookaheadBackend
from sglang_oasis.serving.notes import notes_of
from sglang_oasis.tier.host_pool import HostPool
from sglang_oasis.tier.layout import TierLayout
from test.cases.device_ops import cuda_ops_on
from test.cases.model_runner import make_runner
from test.cases.recorded_streams import RecordedStreams

DEVICE = torch.device("meta")
LAYERS, HEADS, GROUP, DIM, BLOCK, ROWS, CONTEXT, PAGES = 4, 2, 4, 64, 16, 6, 1024, 200
SCALE = DIM**-0.5

WRITTEN = {
    "take_tokens": {"blocks", "head_map", "last_selected", "slot_of", "summaries", "host_kv", "host_summaries"},
    "estimate": {"estimates", "partials"},
    "rank": {"averages", "scores"},
    "select_admissions": {"last_selected", "admitted_blocks", "admitted_slots", "counters"},
    "fetch_blocks": {"blocks", "head_map", "last_selected", "slot_of"},
    "attend": {"out"},
    "summarise_blocks": {"records"},
    "stage_pages": {"staging", "arena"},
    "write_back": {"host_kv"},
    "forget_pages": {"tags"},
    "store_tokens": {"blocks"},
}
"""What each kernel writes, by the names of its arguments."""


def memory(tensor: Tensor) -> Hashable:
    """The whole storage: a kernel may read any view of it."""
    return tensor.untyped_storage()._cdata


class Walk(TorchDispatchMode):
    """Notes what ops and kernels touch.

    Args:
        streams: finds what is not ordered.

    Attributes:
        kernels: names of the kernels launched, each with its stream.
    """

    def __init__(self, streams: RecordedStreams) -> None:
        super().__init__()
        self.streams = streams
        self.kernels: list[tuple[str, str]] = []
        self._kept: list[Tensor] = []
        self._separate: dict[Hashable, int] = {}

    def note(self, reads: Iterable[Any], writes: Iterable[Any]) -> None:
        of_device = [[t for t in part if isinstance(t, Tensor) and t.is_meta] for part in (reads, writes)]
        self._kept += of_device[0] + of_device[1]  # another tensor may not get the address of one that is gone
        self.streams.access(*(map(self._place, part) for part in of_device))

    def separate(self, *tensors: Tensor) -> None:
        """Entries of their first dimension count as different memory, each with what touches all of them."""
        self._separate.update({memory(tensor): tensor.stride(0) for tensor in tensors})

    def _place(self, tensor: Tensor) -> Hashable:
        stride = self._separate.get(memory(tensor))
        return memory(tensor) if stride is None else (memory(tensor), tensor.storage_offset() // stride)

    def launch(self, launch: Launch) -> None:
        name = launch.kernel.__name__
        self.kernels.append((name, self.streams.current))
        written = WRITTEN[name]
        assert written <= set(launch.arguments)
        host = [k for k, v in launch.arguments.items() if isinstance(v, Tensor) and not v.is_meta]
        assert not host, f"{name} is given {host} on the host"
        assert all(isinstance(size, int) for size in launch.grid)
        self.note(
            [value for key, value in launch.arguments.items() if key not in written],
            [launch.arguments[key] for key in written],
        )

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten.copy_.default and args[1].is_meta and not args[0].is_meta:
            assert kwargs.get("non_blocking") or args[2:] == (True,), "a copy to the host must not wait"
            self.note([args[1]], [])
            return args[0]
        result = func(*args, **kwargs)
        written = [
            leaf
            for argument, value in zip(func._schema.arguments, args, strict=False)
            if argument.alias_info is not None and argument.alias_info.is_write
            for leaf in tree_leaves(value)
        ]
        makes_view = any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)
        outputs = [] if makes_view else tree_leaves(result)
        if not makes_view:
            self.note(tree_leaves((args, kwargs)), [*written, *outputs])
        return result


class PlannedWrapper:
    """Takes FlashInfer's arguments and checks what its documentation asks of them (FlashInfer 0.7.2)."""

    walk: Walk

    def __init__(self, workspace: Tensor, layout: str, **options: Any) -> None:
        self.layout, self.buffers, self.planned = layout, options, 0
        self.decodes = "paged_kv_indptr_buffer" in options

    def reset_workspace_buffer(self, workspace: Tensor, numbers: Tensor) -> None:
        assert numbers.is_meta
        self.buffers["numbers"] = numbers

    def plan(self, *args: Any, **options: Any) -> None:
        if not self.decodes:
            starts, *args = args
            assert not starts.is_meta
            assert starts.dtype == torch.int32
        indptr, indices, last_page_len, query_heads, kv_heads, head_dim, block_size = args
        assert not indptr.is_meta, "the plan is made by the host"
        assert not last_page_len.is_meta
        assert indptr.dtype == indices.dtype == last_page_len.dtype == torch.int32
        assert indptr[0] == 0
        assert (indptr[1:] > indptr[:-1]).all()
        assert len(indices) == indptr[-1]
        assert ((last_page_len >= 1) & (last_page_len <= block_size)).all()
        assert query_heads // kv_heads == GROUP
        assert (head_dim, block_size) == (DIM, BLOCK)
        self.shape = (len(last_page_len) * options.get("q_len_per_req", 1), query_heads, kv_heads)
        if self.decodes:
            assert len(self.buffers["paged_kv_last_page_len_buffer"]) == len(last_page_len)
        else:
            self.shape = (int(starts[-1]), query_heads, kv_heads)
            assert options["causal"]
        self.planned += 1

    def run(self, query: Tensor, kv: Any) -> Tensor:
        assert self.planned
        tokens, query_heads, kv_heads = self.shape
        assert query.shape == (tokens, query_heads, DIM)
        if self.layout == "NHD":
            assert kv.shape[1:] == (2, BLOCK, kv_heads, DIM)
        else:
            assert all(half.shape[1:] == (kv_heads, BLOCK, DIM) for half in kv)
            kv = kv[0]
        self.walk.kernels.append(("flashinfer", self.walk.streams.current))
        out = torch.empty_like(query)
        buffers = [buffer for buffer in self.buffers.values() if isinstance(buffer, Tensor)]
        self.walk.note([query, kv, *buffers], [out])
        return out


class Server:
    """The backend of a small model on the meta device, and what SGLang would tell it.

    Args:
        walk: notes what is done; entered for as long as the server is used.
        flags: of lookahead KV.
        drafts: verified per step.
        flashinfer: attend by FlashInfer's wrappers, or by Triton.
    """

    def __init__(self, walk: Walk, flags: dict[str, Any], drafts: int = 0, flashinfer: bool = True) -> None:
        config = LookaheadKVConfig.from_flags(
            {"lookahead_kv_budget_tokens": 8 * BLOCK, **flags},
            BLOCK,
            Speculation("NGRAM", drafts) if drafts else Speculation(),
        )
        layout = TierLayout.of(
            config, num_layers=LAYERS, kv_heads=HEADS, head_dim=DIM, dtype=torch.bfloat16, context_length=CONTEXT,
            draft_tokens=drafts,
        )  # fmt: skip
        host = HostPool(
            num_pages=PAGES, num_layers=LAYERS, kv_heads=HEADS, block_size=BLOCK, head_dim=DIM, dtype=torch.bfloat16,
            summary_format=layout.summary_format,
            allocate=lambda shape, dtype: torch.zeros(shape, dtype=dtype, device=DEVICE),
        )  # fmt: skip
        self.layers = [RadixAttention(HEADS * GROUP, DIM, SCALE, HEADS, layer) for layer in range(LAYERS)]
        self.runner = make_runner(
            self.layers, rows=ROWS, pool_tokens=PAGES * BLOCK, context=CONTEXT + BLOCK, dtype=torch.bfloat16,
            device="meta", model_config=SimpleNamespace(context_len=CONTEXT),
        )  # fmt: skip
        self.pool = self.runner.req_to_token_pool
        self.pool.attach_aux_cache = lambda cache: None
        PlannedWrapper.walk = walk
        setup = AttentionSetup(layout, HEADS * GROUP, torch.bfloat16, SCALE, DEVICE, walk.streams)
        workspace = torch.empty(8, device=DEVICE)
        attention = DeviceAttention(
            FlashInferDecode(setup, workspace, PlannedWrapper), FlashInferPrefill(setup, workspace, PlannedWrapper)
        )
        cache_bytes = 20 * LAYERS * HEADS * layout.chunk_bytes
        self.engine = DeviceEngine(
            EngineSetup(config, layout, host, ROWS + 1, self.pool.req_to_token, [SCALE] * LAYERS),
            DeviceSetup(
                DEVICE, HEADS * GROUP, torch.bfloat16, cache_bytes, walk.streams, attention if flashinfer else None
            ),
        )
        self.backend = LookaheadBackend(self.runner, self.engine)
        # Layers of the page cache, and the counters of urgent fetches and of predictions.
        walk.separate(self.engine.staging.cache.arena, self.engine.pipeline.counters)
        self.drafts = drafts

    def prefill(
        self, rows: Sequence[int], prefixes: Sequence[int], new_tokens: Sequence[int], last: bool = True
    ) -> None:
        total = sum(new_tokens)
        notes_of(self.runner).last_chunks = [last] * len(rows)
        self._forward(
            ForwardMode.EXTEND,
            rows,
            len(rows),
            total,
            [p + n for p, n in zip(prefixes, new_tokens, strict=True)],
            extend_prefix_lens_cpu=list(prefixes),
            extend_seq_lens_cpu=list(new_tokens),
        )

    def decode(self, rows: Sequence[int], lengths: Sequence[int], entries: int | None = None) -> None:
        """`lengths` count the committed tokens; the batch is padded to `entries`."""
        entries = len(rows) if entries is None else entries
        verifies = self.drafts > 0
        mode = ForwardMode.TARGET_VERIFY if verifies else ForwardMode.DECODE
        seq_lens = [length - verifies for length in lengths] + [1] * (entries - len(rows))
        self._forward(mode, rows, entries, entries * (1 + self.drafts), seq_lens)

    def warm_up(self, mode: ForwardMode, entries: int, tokens: int, in_capture: bool = False) -> None:
        """A batch that SGLang makes up, to warm up or to capture a graph."""
        fields = {"extend_prefix_lens_cpu": [0], "extend_seq_lens_cpu": [tokens]}
        self._forward(mode, None, entries, tokens, [1] * entries, in_capture, **fields)

    def note_rows(self, rows: Sequence[int]) -> None:
        """What the seam on `ForwardBatch.init_new` notes."""
        notes_of(self.runner).rows = list(rows)

    @staticmethod
    def indices(count: int) -> Tensor:
        return torch.empty(count, dtype=torch.int64, device=DEVICE)

    def _forward(
        self,
        mode: ForwardMode,
        rows: Sequence[int] | None,
        entries: int,
        tokens: int,
        seq_lens: list[int],
        in_capture: bool = False,
        **fields: Any,
    ) -> None:
        if rows is not None:
            self.note_rows(rows)
        batch: Any = SimpleNamespace(
            rids=None if rows is None else [str(row) for row in rows],
            forward_mode=mode, batch_size=entries, input_ids=self.indices(tokens),
            req_pool_indices=self.indices(entries),
            seq_lens_cpu=torch.tensor(seq_lens), out_cache_loc=self.indices(tokens),
            **fields,
        )  # fmt: skip
        if in_capture:
            self.backend.init_forward_metadata_out_graph(batch, in_capture=True)
            self.backend.init_forward_metadata_in_graph(batch)
        else:
            self.backend.init_forward_metadata(batch)
        forward = self.backend.forward_decode if mode.is_decode() else self.backend.forward_extend
        for layer in self.layers:
            fused = torch.empty((tokens, (GROUP + 2) * HEADS * DIM), dtype=torch.bfloat16, device=DEVICE)
            query, key, value = fused.split([GROUP * HEADS * DIM, HEADS * DIM, HEADS * DIM], dim=-1)
            out = forward(query, key, value, layer, batch)
            assert out.shape == query.shape


class RecordedKernels:
    """The C++ kernels, by their arguments."""

    def __init__(self, walk: Walk) -> None:
        self._walk = walk

    def fused_select_fits(self, *arguments: Any) -> bool:
        return True

    def fused_select(self, *arguments: Any) -> None:
        queries, summaries, _, scaling, rows, candidates, *maps, averages = arguments[:10]
        head_map, last_selected, slot_of = maps
        tensors = [each for each in arguments[10:] if isinstance(each, Tensor)]
        number, cap, admitted, slots, counters, scratch = tensors
        assert queries.is_contiguous()
        self._launch(
            "fused_select",
            [queries, summaries, scaling, rows, candidates, head_map, slot_of, number, cap],
            [last_selected, averages, admitted, slots, counters, scratch],
        )

    def fetch_blocks(self, *arguments: Any) -> None:
        blocks, head_map, last_selected, slot_of, *read = arguments
        self._launch("fetch_blocks", read, [blocks, head_map, last_selected, slot_of])

    def _launch(self, name: str, reads: list[Any], writes: list[Any]) -> None:
        self._walk.kernels.append((name, self._walk.streams.current))
        self._walk.note(reads, writes)


@contextlib.contextmanager
def walking(streams: RecordedStreams, cplusplus: bool = True) -> Iterator[Walk]:
    """Ops on the meta device do what they do on CUDA, up to the launch of a kernel, of C++ where there is one."""
    walk = Walk(streams)
    kernels = RecordedKernels(walk) if cplusplus else None
    with cuda_ops_on("meta", kernels), mock.patch.object(Launch, "run", lambda launch: walk.launch(launch)), walk:
        yield walk
