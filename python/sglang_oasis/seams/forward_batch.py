"""Tells the attention backend the rows of a batch, and which rows of an extend batch are in their last prefill chunk.

Read from sglang 0.5.23: `model_executor/forward_batch_info.ForwardBatch.init_new`. SGLang's own flag
`contains_last_prefill_chunk` covers only the batch as a whole, and the rows of a decode batch exist only on the
device.
"""

from __future__ import annotations

from typing import Any

from sglang_oasis.seams.flags import enabled
from sglang_oasis.seams.seam import Seam
from sglang_oasis.serving.notes import notes_of


def _note_requests(result: Any, cls: type, batch: Any, model_runner: Any, *args: Any, **kwargs: Any) -> Any:
    if not enabled(model_runner.server_args):
        return result
    notes = notes_of(model_runner)
    notes.rows = [request.kv.req_pool_idx for request in batch.reqs]
    if batch.forward_mode.is_extend_without_speculative():
        notes.last_chunks = [request.extend_end == len(request.full_untruncated_fill_ids) for request in batch.reqs]
    return result


SEAMS = [Seam("model_executor.forward_batch_info.ForwardBatch.init_new", _note_requests, "AFTER")]
