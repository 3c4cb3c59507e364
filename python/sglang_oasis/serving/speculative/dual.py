"""Dual-token lookahead (DualDecoder, section 5.2): the model looks one token ahead of its output, without a drafter.

Each step runs two tokens of a request in one forward pass: the newest token, whose logits give the next output, and the
token that the model guesses will follow it. The guess attends as the next step will; its logits give the next guess. If
a guess was right, the next guess is the next output, seen one step early. The first guess is the first token again, not
the real second token as in the paper, because that would need a second pass at the same length.

Emitting the second token, too, would gain nothing, because the next step would have no guess to look ahead with. So a
step emits one token, and the second token only gives the lookahead query.

Read from sglang 0.5.23: `speculative/spec_registry.CustomSpecAlgo`, `speculative/eagle_worker_common.run_eagle_verify`
and `build_eagle_verify_input`, `speculative/eagle_worker_v2.EAGLEWorkerV2.forward_batch_generation`,
`managers/overlap_utils.FutureMap` (which relays `topk_index`, here the second token, to the next step).
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.managers.overlap_utils import FutureMap
from sglang.srt.speculative.base_spec_worker import BaseSpecWorker
from sglang.srt.speculative.eagle_info import EagleDraftInput
from sglang.srt.speculative.eagle_utils import default_tree_mask_mode
from sglang.srt.speculative.eagle_worker_common import build_eagle_verify_input, run_eagle_verify
from sglang.srt.speculative.spec_registry import CustomSpecAlgo
from torch import Tensor

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.managers.tp_worker import TpModelWorker
    from sglang.srt.managers.utils import GenerationBatchResult

TOKENS = 2
"""Tokens per request and step."""


class DualAlgorithm(CustomSpecAlgo):
    """Describes the algorithm to SGLang's scheduler."""

    def need_topk(self) -> bool:
        return True  # the scheduler relays topk_index, the second token

    def has_draft_kv(self) -> bool:
        return False

    def carries_draft_hidden_states(self) -> bool:
        return False

    def get_platform_worker_cls(self) -> None:
        return None

    def create_future_map(
        self,
        device: Any,
        req_to_token_pool: Any,
        needs_cpu_seq_lens: bool = True,
        needs_confidence_relay: bool = False,
    ) -> FutureMap:
        return FutureMap(device, self, req_to_token_pool, needs_cpu_seq_lens, needs_confidence_relay)

    def handle_server_args(self, server_args: Any) -> None:
        server_args.speculative_num_steps = TOKENS - 1
        server_args.speculative_eagle_topk = 1
        server_args.speculative_num_draft_tokens = TOKENS


class DualWorker(BaseSpecWorker):
    """Runs the target model on two tokens per request."""

    def __init__(self, server_args: Any, gpu_id: int, nccl_port: int, target_worker: TpModelWorker) -> None:
        from sglang.srt.runtime_context import get_device

        super().__init__()
        self._target_worker = target_worker
        self.server_args = server_args
        self.device = get_device().device
        self.topk, self.speculative_num_steps, self.speculative_num_draft_tokens = 1, TOKENS - 1, TOKENS

    @property
    def draft_worker(self) -> None:
        return None

    def forward_batch_generation(
        self, batch: ScheduleBatch, on_publish: Any = None, grammar_barrier: Any = None, pp_proxy_tensors: Any = None
    ) -> GenerationBatchResult:
        if batch.forward_mode.is_extend() or batch.is_extend_in_batch:
            result = self.target_worker.forward_batch_generation(batch, pp_proxy_tensors=pp_proxy_tensors)
            result.new_seq_lens = batch.seq_lens
            result.next_draft_input = _draft_input(result.next_token_ids, result.next_token_ids)
            if on_publish is not None:
                on_publish(result.new_seq_lens)
            return result

        given = batch.spec_info
        result = self._run(batch, given.bonus_tokens, given.topk_index[:, 0], grammar_barrier, pp_proxy_tensors)
        if on_publish is not None:
            on_publish(result.new_seq_lens)
        logits = result.logits_output.next_token_logits
        third = logits.view(-1, TOKENS, logits.shape[-1])[:, -1].argmax(-1)
        result.next_draft_input = _draft_input(result.next_draft_input.bonus_tokens, third)
        return result

    def _run(
        self, batch: ScheduleBatch, first: Tensor, second: Tensor, grammar_barrier: Any, pp_proxy_tensors: Any
    ) -> GenerationBatchResult:
        """One forward pass over [first, second] of each request; `seams/speculation.py` rejects the second."""
        if batch.seq_lens_sum is None:  # EAGLE sets it from its draft batch
            lengths = batch.seq_lens if batch.seq_lens_cpu is None else batch.seq_lens_cpu
            batch.seq_lens_sum = int(lengths.sum())
        count = len(batch.seq_lens)
        batch.spec_info = build_eagle_verify_input(
            batch,
            _draft_input(first, second),
            torch.empty((count, 0), dtype=torch.int64, device=self.device),
            torch.zeros((count, 1), dtype=torch.int64, device=self.device),
            second.to(torch.int64).unsqueeze(1),
            None,
            target_worker=self.target_worker,
            topk=1,
            num_steps=TOKENS - 1,
            num_draft_tokens=TOKENS,
            tree_mask_mode=default_tree_mask_mode(),
            device=self.device,
        )
        return run_eagle_verify(
            batch,
            target_worker=self.target_worker,
            req_to_token_pool=self.req_to_token_pool,
            token_to_kv_pool_allocator=self.token_to_kv_pool_allocator,
            plan_stream=None,
            plan_stream_ctx=contextlib.nullcontext(),
            topk=1,
            num_draft_tokens=TOKENS,
            device=self.device,
            metadata_ready_pre_pad=False,
            finalize_tree_path=True,
            pp_proxy_tensors=pp_proxy_tensors,
            grammar_barrier=grammar_barrier,
        )


def _draft_input(first: Tensor, second: Tensor) -> EagleDraftInput:
    index = second.to(torch.int64).unsqueeze(1)
    return EagleDraftInput(bonus_tokens=first, topk_index=index, topk_p=torch.ones_like(index, dtype=torch.float32))
