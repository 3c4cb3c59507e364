"""Tells the attention backend which rows a batch has, and which of an extend batch are in their last prefill chunk.

Read from sglang 0.5.23: `model_executor/forward_batch_info.ForwardBatch.init_new`. SGLang's own flag
`contains_last_prefill_chunk` speaks for the whole batch only, the rows of a batch that decodes are on the device only,
and ad-hoc attributes of the batch are lost when it is rebuilt, so both travel on the model runner.
"""

from __future__ import annotations

from typing import Any

from sglang_oasis.seams.catalogue import Seam
from sglang_oasis.seams.server_args import enabled
from sglang_oasis.serving.lookahead_backend import LAST_CHUNKS_ATTRIBUTE, ROWS_ATTRIBUTE


def _note_requests(result: Any, cls: type, batch: Any, model_runner: Any, *args: Any, **kwargs: Any) -> Any:
    if not enabled(model_runner.server_args):
        return result
    setattr(model_runner, ROWS_ATTRIBUTE, [request.kv.req_pool_idx for request in batch.reqs])
    if batch.forward_mode.is_extend_without_speculative():
        last_chunks = [request.extend_end == len(request.full_untruncated_fill_ids) for request in batch.reqs]
        setattr(model_runner, LAST_CHUNKS_ATTRIBUTE, last_chunks)
    return result


SEAMS = [Seam("model_executor.forward_batch_info.ForwardBatch.init_new", _note_requests, "AFTER")]
