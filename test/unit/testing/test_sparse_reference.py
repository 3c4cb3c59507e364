"""The reference the server is compared with must itself be right: naive loops and plain Hugging Face decide."""

from __future__ import annotations

import math
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, LlamaForCausalLM

from sglang_oasis.testing.selection import minmax_scores, selection_is_top_k, top_k
from sglang_oasis.testing.sparse_reference import SparseReference, masked_attention
from sglang_oasis.testing.tiny_model import tiny_model
from sglang_oasis.testing.trace import StepSelection, load_trace

BLOCK = 4
PROMPT = 42
STEPS = 9
ALL_BLOCKS = (PROMPT + STEPS) // BLOCK + 1
HEADS, KV_HEADS, DIM = 6, 2, 8

Generated = tuple[list[int], Tensor]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny tensors are slower on several threads, most of all on a shared machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def plain() -> LlamaForCausalLM:
    return tiny_model()


@pytest.fixture(scope="module")
def reference(plain: LlamaForCausalLM) -> SparseReference:
    return SparseReference(deepcopy(plain))


@pytest.fixture(scope="module")
def prompt_ids() -> list[int]:
    return torch.randint(61, (PROMPT,), generator=torch.Generator().manual_seed(1)).tolist()


@pytest.fixture(scope="module")
def generated(plain: LlamaForCausalLM, prompt_ids: list[int]) -> Generated:
    """Greedy output ids and their log-probabilities `[STEPS + 1, vocab]` from Hugging Face's own generation."""
    output = plain.generate(
        torch.tensor([prompt_ids]),
        max_new_tokens=STEPS + 1,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    return output.sequences[0, PROMPT:].tolist(), torch.cat(output.logits).log_softmax(-1)


def recorded(selected: list[list[list[int]]], first_local_block: int, position: int) -> StepSelection:
    return StepSelection(position + 1, BLOCK, first_local_block, torch.tensor(selected, dtype=torch.int32))


def naive_attention(query: Tensor, key: Tensor, value: Tensor, attended: list[list[int]]) -> Tensor:
    """One query token, head by head and position by position. `query` `[Hq, D]`; `attended[h]` are positions."""
    output = torch.zeros_like(query)
    group = query.shape[0] // key.shape[0]
    for g in range(query.shape[0]):
        h = g // group
        weights = {p: math.exp(float(query[g] @ key[h, p]) / math.sqrt(query.shape[1])) for p in attended[h]}
        for p, weight in weights.items():
            output[g] += weight / sum(weights.values()) * value[h, p]
    return output


def rotate(x: Tensor, position: int, theta: float) -> Tensor:
    """RoPE of `[..., D]`, coordinate pair by coordinate pair."""
    half = x.shape[-1] // 2
    out = torch.empty_like(x)
    for i in range(half):
        angle = position * theta ** (-i / half)
        cos, sin = math.cos(angle), math.sin(angle)
        out[..., i] = x[..., i] * cos - x[..., i + half] * sin
        out[..., i + half] = x[..., i + half] * cos + x[..., i] * sin
    return out


def naive_scores(
    queries: Tensor, keys: Tensor, first_local_block: list[int], scaling: float
) -> list[list[list[float]]]:
    """The rule, coordinate by coordinate: `[n][H][candidate]`."""
    kv_heads = keys.shape[0]
    group = queries.shape[0] // kv_heads
    result = []
    for i, local in enumerate(first_local_block):
        per_head = []
        for h in range(kv_heads):
            mean = [0.0] * local
            for g in range(h * group, (h + 1) * group):
                bounds = []
                for block in range(local):
                    total = 0.0
                    for d in range(keys.shape[2]):
                        column = keys[h, block * BLOCK : (block + 1) * BLOCK, d]
                        midpoint = float(((column.min() + column.max()) / 2).bfloat16())
                        half_range = float(((column.max() - column.min()) / 2).bfloat16())
                        q = float(queries[g, i, d])
                        total += max(q * (midpoint - half_range), q * (midpoint + half_range))
                    bounds.append(math.exp(total * scaling))
                mean = [m + b / sum(bounds) / group for m, b in zip(mean, bounds, strict=True)]
            per_head.append(mean)
        result.append(per_head)
    return result


# --- the model ---


def test_prefill_and_dense_decode_equal_hugging_face(
    reference: SparseReference, prompt_ids: list[int], generated: Generated
) -> None:
    output_ids, expected = generated
    prompt = reference.prefill(prompt_ids, chunk=16)
    actual = torch.cat([prompt.logprobs[None], reference.decode_dense(prompt, output_ids[:STEPS])])
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=0)


def test_every_block_selected_equals_hugging_face(
    reference: SparseReference, prompt_ids: list[int], generated: Generated
) -> None:
    output_ids, expected = generated
    prompt = reference.prefill(prompt_ids)
    fetched = reference.decode_fetch(prompt, output_ids[:STEPS], k=ALL_BLOCKS, block_size=BLOCK)
    torch.testing.assert_close(fetched.logprobs, expected[1:], atol=1e-4, rtol=0)

    steps = []
    for position in range(PROMPT, PROMPT + STEPS):
        local = position // BLOCK - 1
        everything = list(range(local)) + [-1] * (ALL_BLOCKS - local)
        steps.append(recorded([[everything[::-1]] * KV_HEADS] * 3, local, position))
    replayed = reference.decode_recorded(prompt, output_ids[:STEPS], steps)
    torch.testing.assert_close(replayed.logprobs, expected[1:], atol=1e-4, rtol=0)


def test_one_layer_model_attends_per_kv_head_like_naive_loops(prompt_ids: list[int]) -> None:
    model = tiny_model(layers=1)
    position, token = PROMPT, 7
    blocks = [[0, 6], [3, 5]]
    local = position // BLOCK - 1
    attended = [
        [p for p in range(position + 1) if p // BLOCK in blocks[h] or p // BLOCK >= local] for h in range(KV_HEADS)
    ]

    layer = model.model.layers[0]
    attention = layer.self_attn
    with torch.inference_mode():
        embedded = model.model.embed_tokens(torch.tensor([*prompt_ids, token]))
        normed = layer.input_layernorm(embedded)
        theta = model.config.rope_parameters["rope_theta"]
        keys = attention.k_proj(normed).view(-1, KV_HEADS, DIM)
        keys = torch.stack([rotate(keys[p], p, theta) for p in range(position + 1)], dim=1)
        values = attention.v_proj(normed).view(-1, KV_HEADS, DIM).transpose(0, 1)
        query = rotate(attention.q_proj(normed[-1]).view(HEADS, DIM), position, theta)
        hidden = embedded[-1] + attention.o_proj(naive_attention(query, keys, values, attended).flatten())
        hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        expected = model.lm_head(model.model.norm(hidden)).log_softmax(-1)

    reference = SparseReference(model)
    prompt = reference.prefill(prompt_ids, chunk=10)
    decode = [recorded([[[*chosen, -1] for chosen in order]], local, position) for order in (blocks, blocks[::-1])]
    actual, swapped = (reference.decode_recorded(prompt, [token], [step]).logprobs[0] for step in decode)
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=0)
    assert (swapped - expected).abs().max() > 1e-2, "which head attends to which blocks made no difference"


def test_all_steps_at_once_equal_hugging_face_token_by_token_under_a_mask(
    plain: LlamaForCausalLM, reference: SparseReference, prompt_ids: list[int], generated: Generated
) -> None:
    output_ids, _ = generated
    generator = torch.Generator().manual_seed(2)
    steps = []
    for position in range(PROMPT, PROMPT + STEPS):
        local = position // BLOCK - 1
        chosen = [torch.randperm(local, generator=generator)[:3].tolist() for _ in range(KV_HEADS)]
        steps.append(recorded([chosen] * 3, local, position))
    together = reference.decode_recorded(reference.prefill(prompt_ids), output_ids[:STEPS], steps).logprobs

    cache = DynamicCache()
    with torch.inference_mode():
        plain(torch.tensor([prompt_ids]), past_key_values=cache)
        for i, step in enumerate(steps):
            mask = torch.full((1, HEADS, 1, step.seq_len), -math.inf)
            mask[..., step.first_local_block * BLOCK :] = 0
            for head in range(HEADS):
                for block in step.selected[0, head // (HEADS // KV_HEADS)].tolist():
                    mask[0, head, 0, block * BLOCK : (block + 1) * BLOCK] = 0
            logits = plain(torch.tensor([[output_ids[i]]]), past_key_values=cache, attention_mask=mask).logits[0, 0]
            torch.testing.assert_close(together[i], logits.log_softmax(-1), atol=1e-4, rtol=0)


def test_replaying_the_fetched_selection_gives_the_same_and_sparse_is_not_dense(
    reference: SparseReference, prompt_ids: list[int], generated: Generated
) -> None:
    output_ids, dense = generated
    prompt = reference.prefill(prompt_ids)
    fetched = reference.decode_fetch(prompt, output_ids[:STEPS], k=3, block_size=BLOCK)
    steps = [recorded(fetched.selected[:, i].tolist(), (PROMPT + i) // BLOCK - 1, PROMPT + i) for i in range(STEPS)]
    replayed = reference.decode_recorded(prompt, output_ids[:STEPS], steps)
    torch.testing.assert_close(replayed.logprobs, fetched.logprobs, atol=1e-6, rtol=0)
    assert selection_is_top_k(replayed.scores, fetched.selected, 0.0).all()
    assert (fetched.logprobs - dense[1:]).abs().max() > 1e-2


def test_steps_of_another_prompt_are_refused(reference: SparseReference, prompt_ids: list[int]) -> None:
    prompt = reference.prefill(prompt_ids)
    step = recorded([[[0]] * KV_HEADS] * 3, 5, PROMPT + 1)
    with pytest.raises(ValueError, match="lengths"):
        reference.decode_recorded(prompt, [1], [step])


# --- attention and selection, against loops ---


def test_masked_attention_equals_naive_loops() -> None:
    generator = torch.Generator().manual_seed(3)
    query = torch.randn(HEADS, 2, DIM, generator=generator)
    key, value = torch.randn(2, KV_HEADS, 11, DIM, generator=generator)
    mask = torch.rand(KV_HEADS, 2, 11, generator=generator) < 0.5
    mask[..., 0] = True
    actual = masked_attention(query, key, value, mask, DIM**-0.5)
    for i in range(2):
        attended = [mask[h, i].nonzero().flatten().tolist() for h in range(KV_HEADS)]
        torch.testing.assert_close(actual[:, i], naive_attention(query[:, i], key, value, attended))


def test_minmax_scores_equal_naive_loops() -> None:
    generator = torch.Generator().manual_seed(4)
    queries = torch.randn(HEADS, 3, DIM, generator=generator)
    keys = 3 * torch.randn(KV_HEADS, 27, DIM, generator=generator)
    locals_ = [3, 5, 4]
    actual = minmax_scores(queries, keys, first_local_block=torch.tensor(locals_), block_size=BLOCK, scaling=DIM**-0.5)
    assert actual.shape == (3, KV_HEADS, 6)
    for i, per_head in enumerate(naive_scores(queries, keys, locals_, DIM**-0.5)):
        for h, expected in enumerate(per_head):
            torch.testing.assert_close(actual[i, h, : locals_[i]], torch.tensor(expected))
            assert (actual[i, h, locals_[i] :] == -math.inf).all()


def test_without_candidates_nothing_is_selected() -> None:
    scores = minmax_scores(
        torch.ones(HEADS, 1, DIM),
        torch.ones(KV_HEADS, 8, DIM),
        first_local_block=torch.tensor([0]),
        block_size=BLOCK,
        scaling=1.0,
        sink_blocks=1,
    )
    assert top_k(scores, 3).tolist() == [[[-1, -1, -1]] * KV_HEADS]


def test_sink_blocks_are_always_selected() -> None:
    generator = torch.Generator().manual_seed(5)
    scores = minmax_scores(
        torch.randn(HEADS, 1, DIM, generator=generator),
        torch.randn(KV_HEADS, 40, DIM, generator=generator),
        first_local_block=torch.tensor([9]),
        block_size=BLOCK,
        scaling=1.0,
        sink_blocks=2,
    )
    for chosen in top_k(scores, 3)[0].tolist():
        assert {0, 1} < set(chosen)
    assert not selection_is_top_k(scores, torch.tensor([[[0, 2, 3]] * KV_HEADS]), 0.5).any()


def test_prompt_scores_average_the_last_queries(reference: SparseReference, prompt_ids: list[int]) -> None:
    # The last prefill chunk has 10 tokens, so 10 of the at most 16 queries.
    prompt = reference.prefill(prompt_ids, chunk=16)
    assert prompt.last_queries.shape == (3, HEADS, 10, DIM)
    scores = reference.prompt_scores(prompt, first_local_block=9, block_size=BLOCK)
    for layer in range(3):
        keys = prompt.cache.layers[layer].keys[0]
        per_query = naive_scores(prompt.last_queries[layer], keys, [9] * 10, DIM**-0.5)
        torch.testing.assert_close(scores[layer, :, :9], torch.tensor(per_query).mean(0))
        assert (scores[layer, :, 9:] == -math.inf).all()


@pytest.mark.parametrize(
    ("selected", "tolerance", "valid"),
    [
        ([1, 3, 0], 0.0, True),
        ([0, 1, 2], 0.0, False),  # 2 is just below 3 ...
        ([0, 1, 2], 1e-2, True),  # ... within one percent
        ([0, 1, 4], 1e-2, False),  # 4 is far below
        ([0, 1, 5], 1.0, False),  # 5 is no candidate
        ([0, 1, -1], 1.0, False),  # a slot is empty while 3 is left out
        ([0, 1, 1], 1.0, False),  # a block twice
        ([4, 3, 2, 1, 0, -1], 0.0, True),  # every candidate, one slot too many
        ([4, 3, 2, 1, -1, -1], 1.0, False),
        ([4, 3, 2, 1, 0, 0], 1.0, False),  # the spare slot repeats a block
        ([4, 3, 2, 1, 0, 5], 1.0, False),  # ... or holds no candidate
    ],
)
def test_selection_is_top_k(selected: list[int], tolerance: float, valid: bool) -> None:
    scores = torch.tensor([0.3, 0.4, 0.1498, 0.15, 0.0002, -math.inf])
    assert bool(selection_is_top_k(scores, torch.tensor(selected), tolerance)) is valid


# --- traces ---


def test_traces_are_read_by_request_in_step_order(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(6)
    written: dict[int, dict] = {}
    for number in (11, 9, 100, 10):
        rids = ["other", "mine"] if number % 2 else ["mine"]
        written[number] = {
            "rids": rids,
            "rows": torch.arange(len(rids)),
            "seq_lens": torch.tensor([50 + number] * len(rids)),
            "block_size": BLOCK,
            "first_local_block": torch.tensor([number // 3] * len(rids)),
            "selected": torch.randint(-1, 9, (3, len(rids), KV_HEADS, 5), generator=generator, dtype=torch.int32),
        }
        torch.save(written[number], tmp_path / f"step_{number:08d}.pt")

    steps = load_trace(tmp_path, "mine")
    assert [step.seq_len for step in steps] == [59, 60, 61, 150]
    for step, number in zip(steps, (9, 10, 11, 100), strict=True):
        assert (step.block_size, step.first_local_block) == (BLOCK, number // 3)
        assert torch.equal(step.selected, written[number]["selected"][:, -1])
        assert torch.equal(
            step.attended_tokens, (step.selected >= 0).sum(-1) * BLOCK + step.seq_len - number // 3 * BLOCK
        )
    assert len(load_trace(tmp_path, "other")) == 2
    with pytest.raises(ValueError, match="unknown"):
        load_trace(tmp_path, "unknown")
