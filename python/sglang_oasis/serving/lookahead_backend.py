"""What the attention backends over two tiers have in common: the tiers, who owns their rows, and what is reported.

Read from sglang 0.5.23: `layers/attention/base_attn_backend.py` (AttentionBackend), `mem_cache/memory_pool.py`
(ReqToTokenPool.attach_aux_cache, req_generation), `model_executor/forward_context.py` (the pools that models ask for).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from torch import Tensor

from sglang_oasis.config import LookaheadKVConfig
from sglang_oasis.engine.clock import StepClock
from sglang_oasis.engine.plan import host_pages
from sglang_oasis.engine.trace import SelectionTrace
from sglang_oasis.env import DebugEnv
from sglang_oasis.lookahead.audit import Audit
from sglang_oasis.lookahead.counters import LookaheadCounters
from sglang_oasis.observability.metrics import MetricsExporter
from sglang_oasis.observability.report import statistics
from sglang_oasis.serving.layers import check_layers
from sglang_oasis.serving.row_observer import RowObserver
from sglang_oasis.tier.host_pool import HostPool
from sglang_oasis.tier.integrity import check_integrity
from sglang_oasis.tier.layout import TierLayout
from sglang_oasis.tier.prefill.staging import PrefillStaging
from sglang_oasis.tier.resident_tier import ResidentTier

if TYPE_CHECKING:
    from sglang.srt.model_executor.model_runner import ModelRunner

BACKEND_NAME = "lookahead_kv"
LAST_CHUNKS_ATTRIBUTE = "lookahead_kv_last_chunks"
"""Attribute of the model runner: per request of the extend batch at hand, whether this is its last prefill chunk."""
ROWS_ATTRIBUTE = "lookahead_kv_rows"
"""Attribute of the model runner: row of each request of the batch at hand, on the host."""


class TierBackend(AttentionBackend):
    """The tiers of one model runner.

    Args:
        runner: the model runner, its pools built.
        config: the validated configuration.
        layout: sizes of the tiers.
        host: the host pool that the runner's KV pool wraps.
        row_observer: the target model's, where the runner's model drafts for it; None to attach one.

    Attributes:
        compute_dtype: of weights and activations; K and V may be kept in another.
        token_to_kv_pool, req_to_token_pool: the runner's pools, where SGLang's forward context looks for them.
        tiers: the resident tiers that follow the same rows: this model's and the draft model's.
        controller: policy over the tiers.
        exporter: publishes the statistics to Prometheus, None when SGLang's metrics are off.
        trace: records what decode attends to, None when it is off.
        audit: measures the true recall now and then, None when it is off.
        staging: what prefill passes through, None where it reads the host pool in place.
        clock: where the time of decode steps goes.
    """

    needs_cpu_seq_lens = True
    controller: Any

    def __init__(
        self,
        runner: ModelRunner,
        config: LookaheadKVConfig,
        layout: TierLayout,
        host: HostPool,
        row_observer: RowObserver | None = None,
    ) -> None:
        super().__init__()
        check_layers(runner.model, "--enable-lookahead-kv")
        self.config = config
        self.host = host
        self.tier = ResidentTier(layout, runner.max_running_requests + 1, torch.device(runner.device))
        self.compute_dtype: torch.dtype = runner.dtype
        self.max_context_len = runner.model_config.context_len
        self._runner = runner
        self.token_to_kv_pool = runner.token_to_kv_pool
        self.req_to_token_pool = runner.req_to_token_pool
        if row_observer is None:
            row_observer = RowObserver(self.tier, runner.max_total_num_tokens, self._publish_when_idle)
            self.req_to_token_pool.attach_aux_cache(row_observer)
        else:
            row_observer.tiers.append(self.tier)
        self.tiers = row_observer.tiers
        self.exporter: MetricsExporter | None = None
        self.trace: SelectionTrace | None = None
        self.audit: Audit | None = None
        self.staging: PrefillStaging | None = None
        self.clock = StepClock()
        self._integrity_interval = DebugEnv.read().integrity_interval
        self._passes_begun = 0

    def settle(self) -> None:
        """Both tiers are up to date, and the host may look into them."""
        raise NotImplementedError

    def check_integrity(self) -> None:
        """Verify every invariant of the tiers.

        Raises:
            IntegrityError: names the layer, the row and the invariant.
        """
        self.settle()
        check_integrity(self.tier, self.host, self._pages_of)

    def count_step(self) -> None:
        """A decode step begins; checks integrity before it, when that is due."""
        counters = self.controller.counters
        counters.decode_steps += 1
        if self._integrity_interval and counters.decode_steps % self._integrity_interval == 0:
            self.check_integrity()

    def counters(self) -> LookaheadCounters:
        """What was counted since start-up."""
        return self.controller.counters

    def host_tokens(self) -> tuple[int, int]:
        """(capacity, free) tokens of the host pool; what is not free is held by requests or by the prefix cache."""
        return self._runner.max_total_num_tokens, self._runner.token_to_kv_pool_allocator.available_size()

    def _pages_of(self, row: int, blocks: int) -> Tensor:
        """[blocks] int64, host pages of a row's first blocks as SGLang has them now."""
        size = self.config.block_size
        return host_pages(self.req_to_token_pool.req_to_token, row, blocks * size, size).long()

    def _publish_when_due(self) -> None:
        if self.exporter is not None and self.exporter.due():
            self.exporter.publish(statistics(self))

    def _publish_when_idle(self) -> None:
        """The last row is gone: no decode step will publish what is true from now on."""
        if self.exporter is not None and not len(self.tier.rows):
            self.exporter.publish(statistics(self))
