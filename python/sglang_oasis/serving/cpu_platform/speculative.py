"""Plain-torch stand-ins for the Triton and CUDA ops of SGLang's speculative decoding, for chains of draft tokens.

Read from sglang 0.5.23: `kernels/ops/speculative/` (cache_locs, spec_tree, eagle, gather_spec_extras,
reconstruct_tree), `mem_cache/allocation.assign_req_to_token_pool`. The arguments have SGLang's names, because SGLang
passes some by keyword. `test/unit/serving/test_speculative_ops.py` compares the results with the Triton kernels.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

FULL_MASK = 0
"""SGLang's TreeMaskMode whose masks cover the prefix too; QLEN_ONLY (1) covers the draft tokens alone."""


def extend_cache_locs(
    *,
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    start_offset: Tensor,
    end_offset: Tensor,
    batch_size: int,
    draft_token_num: int,
    device: Any,
) -> Tensor:
    """Return the KV indices of tokens [start, end) of each row, one row after another: [sum(end - start)] int64."""
    rows, columns = _ranges(req_pool_indices, start_offset, end_offset)
    return req_to_token[rows, columns].long()


def assign_req_to_token_pool(
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    start_offset: Tensor,
    end_offset: Tensor,
    out_cache_loc: Tensor,
    batch_size: int,
) -> None:
    """Write the KV indices of tokens [start, end) of each row into SGLang's table."""
    rows, columns = _ranges(req_pool_indices, start_offset, end_offset)
    req_to_token[rows, columns] = out_cache_loc[: len(rows)].to(req_to_token.dtype)


def assign_draft_cache_locs_contiguous(
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    seq_lens: Tensor,
    out_cache_loc: Tensor,
    topk: int,
    num_cols: int,
    positions: Tensor | None = None,
    mrope: Tensor | None = None,
) -> None:
    """Write the KV indices of the topk * num_cols tokens after each sequence into out_cache_loc."""
    assert positions is None, "SGLang asks for positions on CUDA only"
    assert mrope is None, "SGLang asks for mrope positions on CUDA only"
    columns = seq_lens.long().unsqueeze(1) + torch.arange(topk * num_cols)
    out_cache_loc.copy_(req_to_token[req_pool_indices.long().unsqueeze(1), columns].flatten())


def fill_front_out_cache_loc(num_front: Tensor, out_cache_loc: Tensor, front_out_cache_loc: Tensor) -> None:
    """Copy the first num_front[i] entries of each row i of out_cache_loc [n * m], one row after another."""
    window = out_cache_loc.view(len(num_front), -1)
    packed = window[torch.arange(window.shape[1]) < num_front.unsqueeze(1)]
    front_out_cache_loc[: len(packed)] = packed.to(front_out_cache_loc.dtype)


def fill_accept_out_cache_loc(
    accept_index: Tensor, out_cache_loc: Tensor, accept_out_cache_loc: Tensor, size: int
) -> None:
    """Copy the accepted entries of out_cache_loc, without gaps; accept_index is -1 where nothing was accepted."""
    accepted = accept_index.flatten()[:size]
    accepted = accepted[accepted >= 0].long()
    accept_out_cache_loc[: len(accepted)] = out_cache_loc[accepted]


def fill_bonus_tokens(
    accept_tokens: Tensor, accept_lens: Tensor, bonus_tokens: Tensor, accept_stride: int, batch_size: int
) -> None:
    """Write the last accepted token of each row of accept_tokens [n, accept_stride]."""
    last = torch.arange(batch_size) * accept_stride + accept_lens.long() - 1
    bonus_tokens.copy_(accept_tokens.flatten()[last])


def gather_spec_extras(
    indices: Tensor,
    topk_p_buf: Tensor,
    topk_index_buf: Tensor,
    output_tokens_buf: Tensor,
    hidden_states_buf: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Copy rows `indices` of the tensors that the overlap scheduler keeps per request."""
    at = indices.long()
    hidden_states = None if hidden_states_buf is None else hidden_states_buf[at]
    return topk_p_buf[at], topk_index_buf[at], output_tokens_buf[at], hidden_states


def build_tree(
    parent_list: Tensor,
    top_scores_index: Tensor,
    seq_lens: Tensor,
    tree_mask: Tensor,
    positions: Tensor,
    retrieve_index: Tensor,
    retrieve_next_token: Tensor,
    retrieve_next_sibling: Tensor,
    topk: int,
    spec_steps: int,
    num_verify_tokens: int,
    tree_mask_mode: int,
) -> None:
    """Compute the links, positions and masks of n chains of m tokens; `retrieve_*` [n, m] are filled with -1 before.

    Raises:
        NotImplementedError: the drafts branch.
    """
    if topk != 1:
        raise NotImplementedError(f"sglang-oasis verifies chains of draft tokens, not trees of {topk} branches.")
    batch, m = len(seq_lens), num_verify_tokens
    places = torch.arange(m)
    retrieve_index.copy_(torch.arange(batch * m).view(batch, m))
    retrieve_next_token[:, :-1] = places[1:]
    positions.copy_((seq_lens.long().unsqueeze(1) + places).flatten())
    causal = torch.ones(m, m, dtype=torch.bool).tril()
    if int(tree_mask_mode) != FULL_MASK:
        tree_mask[: batch * m * m] = causal.flatten().repeat(batch).to(tree_mask.dtype)
        return
    start = 0
    for length in seq_lens.tolist():  # the masks of two rows differ in width
        width = length + m
        tree_mask[start : start + m * width].view(m, width)[:, length:] = causal.to(tree_mask.dtype)
        start += m * width


def reconstruct_indices_from_tree_mask(
    tree_mask: Tensor,
    verified_seq_len: Tensor,
    positions: Tensor,
    retrieve_index: Tensor,
    retrieve_next_token: Tensor,
    retrieve_next_sibling: Tensor,
    batch_size: int,
    draft_token_num: int,
) -> None:
    """Compute the links and positions of n trees of m tokens from a mask of ancestors.

    Args:
        tree_mask: [n * m * m] bool, whether token j is an ancestor of token i, or i itself, at (i, j) of each tree.
        verified_seq_len: [n], tokens before the tree.
        positions: [n * m] int64, written.
        retrieve_index, retrieve_next_token, retrieve_next_sibling: [n, m] int64, written.
        batch_size, draft_token_num: n, m.
    """
    m = draft_token_num
    places = torch.arange(m)
    ancestors = tree_mask.view(batch_size, m, m).bool() & (places < places.unsqueeze(1))
    parent = torch.where(ancestors, places, -1).amax(-1)
    later = places > places.unsqueeze(1)
    positions.copy_((ancestors.sum(-1) + verified_seq_len.unsqueeze(1)).flatten())
    retrieve_index.copy_(torch.arange(batch_size * m).view(batch_size, m))
    retrieve_next_token.copy_(_first(ancestors.transpose(1, 2) & later))
    siblings = (parent.unsqueeze(1) == parent.unsqueeze(2)) & (parent.unsqueeze(2) >= 0) & later
    retrieve_next_sibling.copy_(_first(siblings))


def verify_tree_greedy(
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    retrieve_index: Tensor,
    retrieve_next_token: Tensor,
    retrieve_next_sibling: Tensor,
    target_predict: Tensor,
    topk: int = -1,
) -> tuple[Tensor, Tensor, Tensor]:
    """Accept the longest path whose tokens are those that the target predicts.

    Args:
        predicts: [n * m] int32, output: the target's predictions, at the accepted places only.
        accept_index: [n, depth] int32, output: accepted places in n * m, -1 after the last.
        accept_token_num: [n] int32, output: number of accepted drafts, without the root.
        candidates: [n, m], the root and the drafts.
        retrieve_index, retrieve_next_token, retrieve_next_sibling: [n, m], links; -1 where there is none.
        target_predict: [n, m].
        topk: not used.
    """
    batch, m = candidates.shape
    rows = torch.arange(batch)
    target = target_predict.view(batch, m)
    accepted = torch.zeros(batch, dtype=torch.int64)
    last = torch.zeros(batch, dtype=torch.int64)
    accept_index[:, 0] = retrieve_index[:, 0]
    for _ in range(1, accept_index.shape[1]):
        node, wanted = retrieve_next_token[rows, last], target[rows, last]
        while ((node >= 0) & (other := candidates[rows, node.clamp(min=0)] != wanted)).any():
            node = torch.where((node >= 0) & other, retrieve_next_sibling[rows, node.clamp(min=0)], node)
        on = (node >= 0).nonzero().flatten()
        if not len(on):
            break
        predicts[retrieve_index[on, last[on]]] = wanted[on].to(predicts.dtype)
        last = torch.where(node >= 0, node, last)
        accepted[on] += 1
        accept_index[on, accepted[on]] = retrieve_index[on, last[on]].to(accept_index.dtype)
        # A row that has stopped does not continue: its next token can match only if this one has matched.
    predicts[retrieve_index[rows, last]] = target[rows, last].to(predicts.dtype)
    accept_token_num.copy_(accepted)
    return predicts, accept_index, accept_token_num


def _ranges(rows: Tensor, starts: Tensor, ends: Tensor) -> tuple[Tensor, Tensor]:
    """Return (row, column), int64, of every column in [starts[i], ends[i]) of rows[i]."""
    counts = (ends - starts).long()
    columns = torch.arange(int(counts.sum())) - (counts.cumsum(0) - counts - starts.long()).repeat_interleave(counts)
    return rows.long().repeat_interleave(counts), columns


def _first(choice: Tensor) -> Tensor:
    """Return the first true column of each row, or -1: [n, m, m] bool -> [n, m] int64."""
    return torch.where(choice.any(-1), choice.int().argmax(-1), -1)
