"""The planner's sizes are those of the tiers, its limits behave like limits, and its flags fit what they promise."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_oasis.config import LookaheadKVConfig
from sglang_oasis.errors import LookaheadKVError
from sglang_oasis.planner.capacity import Deployment, capacity_of, default_memory_fraction, request_bytes
from sglang_oasis.planner.hardware import GPUS, MIB, Gpu, gpu_of
from sglang_oasis.planner.models import KNOWN_MODELS, model_of, shape_of
from sglang_oasis.planner.plan import make_plan
from sglang_oasis.planner.roofline import dense_step, sparse_step
from sglang_oasis.planner.sweep import fetch_cap_sweep
from sglang_oasis.tier.host_pool import HostPool
from sglang_oasis.tier.layout import TierLayout, fetch_cap
from sglang_oasis.tier.prefill.staging import PrefillStaging
from sglang_oasis.tier.resident_tier import ResidentTier

QWEN3_8B = "Qwen/Qwen3-8B"


def deployment(
    model: str = QWEN3_8B,
    gpu: str | Gpu = "h100",
    context: int = 32_768,
    tp: int = 1,
    host_bytes: int | None = None,
    **flags: Any,
) -> Deployment:
    config = LookaheadKVConfig.from_flags({f"lookahead_kv_{name}": value for name, value in flags.items()})
    shape = gpu_of(gpu) if isinstance(gpu, str) else gpu
    return Deployment(model_of(model), shape, config, context, tp, host_bytes, default_memory_fraction(shape, tp))


# Models


@pytest.mark.parametrize(
    ("name", "published"),
    [
        ("Qwen3-8B", 8_190_735_360),
        ("Qwen3-32B", 32_762_123_264),
        ("Qwen3-235B-A22B", 235_093_634_560),
        ("Llama-3.1-8B", 8_030_261_248),
        ("Llama-3.1-70B", 70_553_706_496),
    ],
)
def test_known_models_have_the_parameters_of_their_checkpoints(name: str, published: int) -> None:
    assert model_of(name).parameters == pytest.approx(published, rel=1e-4)


def test_experts_are_read_as_tokens_choose_them() -> None:
    model = model_of("Qwen3-235B-A22B")
    assert model.active_parameters == pytest.approx(22e9, rel=0.03)
    read = [model.parameters_read(tokens) for tokens in (1, 8, 64, 4096)]
    assert read[0] == pytest.approx(model.active_parameters)
    assert read == sorted(read)
    assert read[-1] == pytest.approx(model.parameters - model.vocabulary * model.hidden, rel=1e-6)


def test_a_model_folder_gives_what_its_name_gives(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(KNOWN_MODELS[QWEN3_8B]))
    for path in (tmp_path, tmp_path / "config.json"):
        assert replace(model_of(str(path)), name=QWEN3_8B) == model_of("qwen3-8b")
        assert model_of(str(path)).name == str(tmp_path)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"kv_lora_rank": 512}, "MLA"),
        ({"is_encoder_decoder": True}, "cross-attention"),
        ({"sliding_window": 4096}, "sliding-window"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "without full attention"),
        ({"model_type": "gpt2"}, "model_type gpt2"),
        ({"architectures": ["BertModel"]}, "architecture BertModel"),
        ({"head_dim": 72}, "heads of 72"),
        ({"head_dim": 512}, "heads of 512"),
        ({"head_dim": None, "hidden_size": 2304}, "heads of 72"),
        ({"quantization_config": {"bits": 4}}, "--weight-bits"),
        ({"mlp_only_layers": [3]}, "mixes layers"),
        ({"num_key_value_heads": 5}, "5 KV heads"),
        ({"num_hidden_layers": "36"}, "num_hidden_layers 36"),
        ({"hidden_size": None}, "hidden_size None"),
        ({"torch_dtype": "float8_e4m3fn"}, "float8_e4m3fn"),
    ],
)
def test_a_model_that_cannot_be_planned_is_refused(change: dict[str, Any], complaint: str) -> None:
    with pytest.raises(LookaheadKVError, match=complaint):
        shape_of({**KNOWN_MODELS[QWEN3_8B], **change}, "m")


@pytest.mark.parametrize("head_dim", [8, 16, 72, 80, 240, 256, 264, 272, 512])
def test_the_heads_that_are_planned_are_those_that_the_kernels_take(head_dim: int) -> None:
    overrides = pytest.importorskip("sglang_oasis.kernels.triton.overrides")
    blocks = torch.empty(1, head_dim, device="meta")
    with mock.patch.object(overrides, "launches"):
        taken = overrides.attend(*[blocks] * 6, 1.0, 1) is not NotImplemented
    if taken:
        assert shape_of({**KNOWN_MODELS[QWEN3_8B], "head_dim": head_dim}, "m").head_dim == head_dim
    else:
        with pytest.raises(LookaheadKVError, match=f"heads of {head_dim}"):
            shape_of({**KNOWN_MODELS[QWEN3_8B], "head_dim": head_dim}, "m")


def test_a_window_that_is_switched_off_is_no_window() -> None:
    config = {**KNOWN_MODELS[QWEN3_8B], "sliding_window": 4096, "use_sliding_window": False}
    assert shape_of(config, QWEN3_8B) == model_of(QWEN3_8B)


def test_quantised_weights_are_counted_with_the_bits_that_are_given() -> None:
    config = {**KNOWN_MODELS[QWEN3_8B], "quantization_config": {"bits": 4}}
    quantised, whole = shape_of(config, "m", weight_bits=4), model_of(QWEN3_8B)
    assert quantised.weight_bytes * 4 == whole.weight_bytes
    assert quantised.kv_token_bytes == whole.kv_token_bytes


# Bytes of the tiers

layouts = st.builds(
    lambda flags, block, layers, heads, head_dim, dtype, context: TierLayout.of(
        LookaheadKVConfig.from_flags({f"lookahead_kv_{name}": value for name, value in flags.items()}, block),
        num_layers=layers,
        kv_heads=heads,
        head_dim=head_dim,
        dtype=dtype,
        context_length=context,
    ),
    flags=st.fixed_dictionaries(
        {
            "budget_tokens": st.sampled_from([64, 128, 256]),
            "recent_tokens": st.sampled_from([0, 16, 40]),
            "smoothing": st.sampled_from([0.0, 0.9]),
            "miss_policy": st.sampled_from(["drop", "fetch"]),
            "summary_dtype": st.sampled_from(["bf16", "int8", "int4"]),
            "dense_layers": st.sampled_from(["", "0"]),
        }
    ),
    block=st.sampled_from([8, 16, 32]),
    layers=st.integers(1, 3),
    heads=st.integers(1, 3),
    head_dim=st.sampled_from([8, 32]),
    dtype=st.sampled_from([torch.bfloat16, torch.float32]),
    context=st.integers(1, 600),
)


@given(layouts, st.integers(1, 3))
@settings(max_examples=60, deadline=None)
def test_tier_bytes_are_those_that_the_tiers_allocate(layout: TierLayout, rows: int) -> None:
    context = (layout.max_blocks - 1) * layout.block_size
    planned = request_bytes(layout, context)
    tiers = ResidentTier(layout, rows, torch.device("cpu")).layers
    assert sum(layer.blocks.nbytes for layer in tiers) == rows * planned.resident
    assert sum(tensor.nbytes for layer in tiers for tensor in layer.maps) == rows * planned.head_maps
    assert sum(layer.summaries.nbytes for layer in tiers) == rows * planned.row_summaries
    assert sum(layer.averages.nbytes for layer in tiers if layer.averages is not None) == rows * planned.averages
    host = HostPool(
        num_pages=context // layout.block_size,
        num_layers=layout.num_layers,
        kv_heads=layout.kv_heads,
        block_size=layout.block_size,
        head_dim=layout.head_dim,
        dtype=layout.dtype,
        summary_format=layout.summary_format,
    )
    assert sum(kv.nbytes for kv in host.kv) == planned.host_kv
    assert sum(summaries.nbytes for summaries in host.summaries) == planned.host_summaries


# Capacity

SMALL_GPU = replace(GPUS["l40s"], memory_bytes=40_000 * MIB)


@given(st.integers(1, 400), st.integers(0, 400))
@settings(max_examples=50, deadline=None)
def test_more_host_memory_never_holds_fewer_requests(gigabytes: int, more: int) -> None:
    less, most = (capacity_of(deployment(host_bytes=size * 10**9 + 10**10)) for size in (gigabytes, gigabytes + more))
    assert less.lookahead <= most.lookahead <= capacity_of(deployment()).lookahead


@given(st.integers(1, 60_000), st.integers(0, 60_000))
@settings(max_examples=50, deadline=None)
def test_longer_contexts_never_let_more_requests_in(context: int, more: int) -> None:
    short, long = capacity_of(deployment(context=context)), capacity_of(deployment(context=context + more))
    assert long.dense <= short.dense
    assert long.lookahead <= short.lookahead


@given(st.integers(40_000, 140_000), st.integers(0, 60_000))
@settings(max_examples=50, deadline=None)
def test_more_device_memory_never_holds_fewer_requests(mib: int, more: int) -> None:
    gpus = [replace(GPUS["h100"], memory_bytes=size * MIB) for size in (mib, mib + more)]
    less, most = (capacity_of(replace(deployment(), gpu=gpu, memory_fraction=0.8)) for gpu in gpus)
    assert less.dense <= most.dense
    assert less.lookahead <= most.lookahead


@given(st.integers(1, 200_000), st.integers(1, 40))
@settings(max_examples=50, deadline=None)
def test_the_host_holds_as_many_requests_as_it_has_pages_for(context: int, requests: int) -> None:
    plan = deployment("Qwen3-235B-A22B", "h200", context, tp=8)
    enough = plan.tp * (1 + requests * -(-context // 16)) * plan.layout.host_page_bytes
    assert capacity_of(replace(plan, host_bytes=enough)).host_requests == requests
    if requests > 1:
        assert capacity_of(replace(plan, host_bytes=enough - 1)).host_requests == requests - 1


@given(st.integers(1, 200_000))
@settings(max_examples=50, deadline=None)
def test_rows_and_the_staging_of_a_prompt_fill_the_device_but_for_less_than_a_row(context: int) -> None:
    plan = deployment(context=context)
    rows = capacity_of(plan).lookahead + 1
    left = plan.kv_bytes - rows * plan.layout.row_bytes - 2 * context * 2 * 8 * 128 * 2
    assert 0 <= left < plan.layout.row_bytes


def test_a_larger_budget_never_lets_more_requests_in() -> None:
    rows = [capacity_of(deployment(budget_tokens=budget)).lookahead for budget in (512, 1024, 2048, 4096, 8192)]
    assert rows == sorted(rows, reverse=True)


def test_kv_heads_fewer_than_ranks_are_held_twice() -> None:
    whole, split = deployment("Qwen3-235B-A22B", "h200", tp=4), deployment("Qwen3-235B-A22B", "h200", tp=8)
    assert whole.kv_token_bytes == split.kv_token_bytes == whole.model.kv_token_bytes // 4


def test_the_memory_fraction_is_what_sglang_reserves() -> None:
    # 512 + 1.5 * 8192 + 128 + 2 * 256 MiB of 81559; of an L40S 512 + 1.5 * 4096 + 128 + 2 * 32 of 46068.
    assert default_memory_fraction(GPUS["h100"], 1) == round(1 - 13_440 / 81_559, 3)
    assert default_memory_fraction(GPUS["l40s"], 1) == round(1 - 6848 / 46_068, 3)


# Steps


@given(st.integers(1, 300), st.integers(0, 200), st.floats(0, 128), st.floats(0, 128))
@settings(max_examples=50, deadline=None)
def test_a_step_takes_longer_with_more_requests_and_more_to_fetch(
    batch: int, more: int, blocks: float, more_blocks: float
) -> None:
    plan = deployment()
    step = sparse_step(plan, batch, blocks)
    assert step.seconds == max(step.device_seconds, step.fetch_seconds)
    assert sparse_step(plan, batch + more, blocks).seconds >= step.seconds
    assert sparse_step(plan, batch, blocks + more_blocks).seconds >= step.seconds
    assert dense_step(plan, batch + more).seconds >= dense_step(plan, batch).seconds


def test_a_context_that_fits_the_budget_is_served_densely() -> None:
    plan = deployment(context=1024)
    sparse = sparse_step(plan, 32, blocks=6)
    assert (sparse.fetch_bytes, sparse.predict, sparse.select) == (0, 0, 0)
    assert sparse.seconds == dense_step(plan, 32).seconds


@pytest.mark.parametrize(
    ("context", "budget", "missing"),
    [(32_768, 32_768, 0), (32_752, 32_768, 0), (32_768, 32_000, 46), (32_768, 2048, 1918), (100, 2048, 0)],
)
def test_a_step_fetches_no_more_than_what_is_selectable_and_not_resident(
    context: int, budget: int, missing: int
) -> None:
    # 32,768 tokens are 2048 blocks, of which the open one and a recent one are local.
    plan = deployment(context=context, budget_tokens=budget)
    assert plan.fetchable_blocks == missing
    most = plan.layout.step_bytes(missing)
    assert sparse_step(plan, 3, blocks=128).fetch_bytes == 3 * min(most, plan.layout.step_bytes(128))
    assert max(point.fetch_bytes for point in fetch_cap_sweep(plan, 3)) == 3 * min(
        most, plan.layout.step_bytes(budget // 16)
    )


def test_a_plan_in_which_nothing_is_missing_fetches_nothing_and_says_that_it_does_not_help() -> None:
    plan = make_plan(deployment(budget_tokens=32_768, fetch_ratio="auto"))
    assert (plan.fetched_blocks, plan.sparse.fetch_bytes, plan.sparse.fetch_seconds) == (0, 0, 0)
    assert [remark for remark in plan.remarks if "does not help" in remark]
    assert not make_plan(deployment()).remarks


def test_a_dense_step_reads_weights_and_cache_at_the_bandwidth_of_the_memory() -> None:
    plan, batch = deployment(context=16_384), 16
    parameters = plan.model.parameters - plan.model.vocabulary * plan.model.hidden
    expected = (2 * parameters + batch * 16_384 * 147_456) / 3.35e12
    assert dense_step(plan, batch).seconds == pytest.approx(expected)


@pytest.mark.parametrize(("smoothing", "passes"), [(0.0, 1), (0.9, 3)])
def test_predicting_reads_all_summaries_and_passes_over_the_scores(smoothing: float, passes: int) -> None:
    plan, batch = deployment(smoothing=smoothing), 10
    scores = 36 * 8 * 2049 * 4
    expected = batch * (plan.layout.row_summary_bytes + passes * scores) / 3.35e12
    assert sparse_step(plan, batch, blocks=6).predict == pytest.approx(expected)


def test_a_large_batch_of_short_requests_is_bound_by_compute() -> None:
    assert dense_step(deployment(context=64), 4000).bound == "compute"


def test_the_fetch_cap_is_what_the_link_hides_unless_it_is_given() -> None:
    chosen = make_plan(deployment(fetch_ratio="auto"))
    assert 1 <= chosen.cap < fetch_cap(0.05, 128)
    assert chosen.sparse.fetch_seconds <= chosen.sparse.device_seconds
    block = chosen.batch * chosen.deployment.layout.step_bytes(1)
    assert chosen.step_bytes < (chosen.cap + 1) * block
    assert make_plan(deployment(fetch_ratio=0.05)).cap == fetch_cap(0.05, 128)
    assert make_plan(deployment(fetch_ratio="auto"), batch=1).cap == fetch_cap(0.05, 128)
    assert make_plan(deployment(fetch_ratio="auto"), drift=0.5).cap == fetch_cap(0.05, 128)


# The recommended command


@given(st.integers(1, 300), st.integers(1, 60))
@settings(max_examples=40, deadline=None)
def test_a_ratio_that_was_not_given_never_exceeds_the_default(batch: int, blocks: int) -> None:
    plan = make_plan(deployment(context=8192, budget_tokens=32 * blocks, fetch_ratio="auto", gpu="h200"), batch)
    assert plan.fetch_ratio <= 0.05
    assert fetch_cap(plan.fetch_ratio, 2 * blocks) == plan.cap


def test_the_device_flag_is_the_device_tier_and_the_staging_of_a_prompt() -> None:
    plan = make_plan(deployment())
    staging = 2 * 2049 * 8 * 16 * 2 * 128 * 2
    assert plan.device_flag_bytes == plan.device_tier_bytes + staging
    assert f"--lookahead-kv-device-gb {plan.device_flag_bytes / 1e9 + 0.0005:.3f}" in plan.command


@given(
    st.sampled_from(["Qwen3-8B", "Llama-3.1-70B", "Qwen3-235B-A22B"]),
    st.integers(4000, 130_000),
    st.sampled_from([512, 2048, 4096]),
    st.sampled_from([None, 1, 5]),
)
@settings(max_examples=20, deadline=None)
def test_the_recommended_flags_give_the_planned_rows_and_cap(
    model: str, context: int, budget: int, batch: int | None
) -> None:
    plan = make_plan(
        deployment(model, "h200", context, tp=8, budget_tokens=budget, fetch_ratio="auto", dense_layers="0"), batch
    )
    words = shlex.split(plan.command)
    assert words[:4] == ["python", "-m", "sglang.launch_server", "--enable-lookahead-kv"]
    flags = dict(zip(words[4::2], words[5::2], strict=True))
    given_flags = {name[2:].replace("-", "_"): value for name, value in flags.items()}
    numbers = {"lookahead_kv_budget_tokens": int}
    config = LookaheadKVConfig.from_flags(
        {k: numbers.get(k, str)(v) for k, v in given_flags.items() if k.startswith("lookahead_kv")},
        int(flags["--page-size"]),
    )
    layout = replace(plan.deployment, config=config).layout
    assert config.device_gb is not None
    assert config.host_gb is not None
    assert config.fetch_ratio is not None
    assert layout == plan.deployment.layout
    rows = layout.rows_in(int(config.device_gb * 1e9) - PrefillStaging.bytes_of(layout, layout.max_blocks))
    assert rows >= plan.batch == int(flags["--max-running-requests"])
    pages = int(config.host_gb * 1e9) // layout.host_page_bytes
    assert pages >= 1 + plan.batch * -(-context // layout.block_size)
    assert fetch_cap(config.fetch_ratio, min(layout.selected_blocks)) == plan.cap
