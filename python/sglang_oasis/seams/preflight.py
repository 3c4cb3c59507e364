"""Checks before a server with lookahead KV or with the dense backend starts.

They run in the launcher, before a process is spawned.

Read from sglang 0.5.23: field names of ServerArgs, `arg_groups/model_override_base.py` (resolving_view,
model_config_of), `configs/model_config.ModelConfig`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sglang_oasis.config import AUTO, DEFAULT_BLOCK_SIZE, DENSE_BACKEND_NAME, DUAL_ALGORITHM, check_block_size
from sglang_oasis.env import DebugEnv
from sglang_oasis.errors import LookaheadKVError
from sglang_oasis.kernels.cpu import native
from sglang_oasis.lookahead.selectors import SELECTORS, BoundSelector
from sglang_oasis.lookahead.sources import SOURCES
from sglang_oasis.ops import device_step
from sglang_oasis.seams import dtypes
from sglang_oasis.seams.calibration import calibration_of
from sglang_oasis.seams.flags import EAGLE3, NGRAM, algorithm_of, config_of, enabled
from sglang_oasis.seams.launch_environment import (
    cache_compiled_code_by_cpu,
    check_model_folder,
    divide_cores,
    ranks_per_host,
    share_the_cores,
)
from sglang_oasis.seams.machine_flags import as_typed, check_device_flags, check_packages
from sglang_oasis.seams.sizing import check_host_bytes, draft_layout_of_flags, layout_of_model, note_free_host_bytes
from sglang_oasis.tier.budget import UNKNOWN, divide_memory

# Field of ServerArgs -> values that work with the host pool. The flag is the field's name with dashes.
_REQUIRED: dict[str, tuple[Any, ...]] = {
    "attention_backend": (None,),
    "prefill_attention_backend": (None,),
    "decode_attention_backend": (None,),
    "disaggregation_mode": ("null",),
    "is_embedding": (False,),
    "speculative_adaptive": (False,),
    "speculative_draft_attention_backend": (None,),
    "speculative_draft_kv_cache_dtype": (None,),
    "speculative_draft_window_size": (None,),
    "speculative_use_rejection_sampling": (False,),
    "enable_multi_layer_eagle": (False,),
    "enable_hierarchical_cache": (False,),
    "enable_hisparse": (False,),
    "enable_mixed_chunk": (False,),
    "enable_unified_memory": (False,),
    "enable_unified_cache_external_linker": (False,),
    "enable_page_major_kv_layout": (False,),
    "enable_kv_cache_sharding": (False,),
    "enable_two_batch_overlap": (False,),
    "enable_pdmux": (False,),
    "enable_memory_saver": (False,),
    "enable_torch_compile": (False,),
    "prefill_only_disable_kv_cache": (False,),
    "enable_prefill_cp": (False,),
    "kv_canary": ("none",),
    "enable_deterministic_inference": (False,),
    "speculative_accept_threshold_single": (1.0,),
    "speculative_accept_threshold_acc": (1.0,),
    "enable_lmcache": (False,),
    "enable_flexkv": (False,),
    "dllm_algorithm": (None,),
    "cpu_offload_gb": (0,),
    "tokenizer_worker_num": (1,),
    "pp_size": (1,),
    "dcp_size": (1,),
    "attn_cp_size": (1,),
    "attn_dp_size": (1,),
    "enable_dp_attention": (False,),
}
_ALGORITHMS = (None, EAGLE3, NGRAM)


def asked_by(server_args: Any) -> str:
    """Return the flag that asked for the host pool, as a user types it."""
    return "--enable-lookahead-kv" if enabled(server_args) else f"--attention-backend {DENSE_BACKEND_NAME}"


def check_before_resolution(server_args: Any) -> None:
    """Check the flags and the model folder.

    Raises:
        LookaheadKVError: one sentence.
    """
    page_size = DEFAULT_BLOCK_SIZE if server_args.page_size is None else server_args.page_size
    check_block_size(page_size)
    if enabled(server_args):
        config = config_of(server_args, page_size)
        SELECTORS.find(config.selector)
        SOURCES.find(config.source)
    for field, allowed in _REQUIRED.items():
        value = getattr(server_args, field)
        asked_for = field == "attention_backend" and not enabled(server_args)
        if value not in allowed and not asked_for:
            raise _does_not_work_with(server_args, field)
    if server_args.kv_cache_dtype not in (dtypes.AUTO, *dtypes.KV_DTYPES):
        raise LookaheadKVError(
            f"{asked_by(server_args)} does not work with --kv-cache-dtype {server_args.kv_cache_dtype}, which "
            f"quantises the KV cache: use auto."
        )
    chunk = server_args.chunked_prefill_size
    if chunk is not None and chunk > 0 and chunk % page_size:
        raise LookaheadKVError(f"--chunked-prefill-size must be a multiple of the page size {page_size}, got {chunk}.")
    _check_overrides(server_args.json_model_override_args)
    _check_drafts(server_args)
    _check_folder("--model-path", server_args.model_path, server_args.load_format)
    if algorithm_of(server_args) == EAGLE3:
        _check_draft_model(server_args)


def check_model(server_args: Any) -> None:
    """Check the model's architecture.

    Raises:
        LookaheadKVError: one sentence.
    """
    from sglang.srt.arg_groups.overrides import model_config_of, use_mla_backend

    model = model_config_of(server_args)
    architecture = ", ".join(model.hf_config.architectures or ["an unknown architecture"])
    unsupported = {
        "latent attention (MLA)": use_mla_backend(server_args),
        "sliding-window layers": model.is_hybrid_swa or _has_sliding_window(model.hf_text_config),
        "an encoder and cross attention": model.is_encoder_decoder,
        "no decoder": not model.is_generation,
        "state-space layers": _has_state_space(model),
        "logit soft-capping": bool(getattr(model.hf_text_config, "attn_logit_softcapping", None)),
    }
    for trait, present in unsupported.items():
        if present:
            raise LookaheadKVError(
                f"{asked_by(server_args)} serves MHA, GQA and MQA models only, but {architecture} has {trait}: start "
                f"the server without the flag."
            )
    if model.v_head_dim != model.head_dim:
        raise LookaheadKVError(
            f"{asked_by(server_args)} needs keys and values of one head size, but {architecture} has {model.head_dim} "
            f"and {model.v_head_dim}: start the server without the flag."
        )


def check_after_resolution(server_args: Any) -> None:
    """Check the arguments that depend on the device, and that the tiers fit into the memory.

    Raises:
        LookaheadKVError: one sentence.
    """
    from sglang.srt.arg_groups.overrides import model_config_of, resolving_view

    view = resolving_view(server_args)
    check_device_flags(view)
    check_packages(view)
    _check_heads(model_config_of(server_args), view.tp_size)
    if enabled(server_args):
        if view.device != "cpu" or DebugEnv.read().device_path:
            check_device(server_args, model_config_of(server_args), view)
        _check_memory(server_args, model_config_of(server_args), view)
        calibration_of(config_of(server_args, view.page_size), model_config_of(server_args), view.tp_size)
    elif view.device != "cpu":
        raise LookaheadKVError(
            f"--attention-backend {DENSE_BACKEND_NAME} runs on CPUs only, not on {view.device}: remove the flag."
        )
    if view.device == "cpu":
        divide_cores(ranks_per_host(server_args))
        share_the_cores()
        cache_compiled_code_by_cpu()
        native.prepare()  # here, where the user sees the messages, and not in every rank


def check_device(server_args: Any, model: Any, view: Any) -> None:
    """Refuse settings that only a CPU supports so far.

    Raises:
        LookaheadKVError: one sentence.
    """
    if view.device not in ("cpu", "cuda"):
        raise LookaheadKVError(
            f"--enable-lookahead-kv runs on CPUs and CUDA devices, not on {view.device}: remove the flag."
        )
    config = config_of(server_args, view.page_size)
    wanted: dict[str, tuple[bool, str]] = {
        "--lookahead-kv-miss-policy auto": (config.miss_policy == AUTO, "use drop or fetch"),
        "--lookahead-kv-fetch-ratio auto": (config.fetch_ratio is None, "give a number"),
        "--lookahead-kv-audit-interval": (config.audit_interval > 0, "remove the flag"),
        f"--lookahead-kv-selector {config.selector}": (
            not isinstance(SELECTORS.find(config.selector), BoundSelector),
            "use minmax or midrange, because its kernels compute bounds only",
        ),
        "--speculative-algorithm EAGLE3": (view.speculative_algorithm == EAGLE3, "use NGRAM or remove the flag"),
        "--lookahead-kv-source dual": (view.speculative_algorithm == DUAL_ALGORITHM, "use last-query"),
        f"heads of {model.head_dim}": (
            not device_step.serves(model.head_dim),
            "use a model whose head size is a multiple of 16 up to 256",
        ),
    }
    for what, (asked, remedy) in wanted.items():
        if asked:
            raise LookaheadKVError(f"--enable-lookahead-kv does not support {what} on a CUDA device yet: {remedy}.")
    graphs = view.cuda_graph_config
    if DebugEnv.read().trace_dir is not None and graphs.decode.backend != "disabled":
        raise LookaheadKVError(
            "SGLANG_OASIS_TRACE_DIR records every decode step, which does not work with CUDA graphs: add "
            "--disable-cuda-graph or unset the variable."
        )
    for phase, allowed in (("decode", "full"), ("prefill", "breakable")):
        backend = getattr(graphs, phase).backend
        if backend not in (allowed, "disabled"):
            raise LookaheadKVError(
                f"--enable-lookahead-kv does not work with --cuda-graph-backend-{phase} {backend}: use {allowed} or "
                f"disabled."
            )


def _check_heads(model: Any, tp_size: int) -> None:
    """Refuse a --tp-size that does not divide the heads, which SGLang would notice only when it loads the weights."""
    heads, kv_heads = model.get_total_num_attention_heads(), model.get_total_num_kv_heads()
    if heads % tp_size or (kv_heads % tp_size and tp_size % kv_heads):
        raise LookaheadKVError(
            f"--tp-size {tp_size} does not divide the model's {heads} query and {kv_heads} KV heads: use another value."
        )


def _check_overrides(text: str) -> None:
    try:
        overrides = json.loads(text)
    except ValueError:
        overrides = None
    if not isinstance(overrides, dict):
        raise LookaheadKVError(f"--json-model-override-args must be a JSON object, got {text}.")


def _check_folder(flag: str, path: str, load_format: str) -> None:
    folder = Path(path)
    if folder.is_dir() and load_format == "gguf":
        raise LookaheadKVError(f"--load-format gguf reads a file, but {folder} is a folder: give a file to {flag}.")
    if folder.is_dir() and load_format == "sharded_state" and not list(folder.glob("model-rank-*-part-*.safetensors")):
        raise LookaheadKVError(
            f"--load-format sharded_state finds no model-rank-*-part-*.safetensors in {folder}: remove the flag."
        )
    if folder.is_dir():
        check_model_folder(folder, flag=flag, weights=load_format in ("auto", "safetensors"))
    elif folder.is_absolute() and not folder.exists():  # a GGUF file is allowed
        raise LookaheadKVError(f"The model folder {folder} does not exist: check {flag}.")


def _check_draft_model(server_args: Any) -> None:
    path = server_args.speculative_draft_model_path
    if path is None:
        raise LookaheadKVError(
            f"--speculative-algorithm {EAGLE3} needs a draft model: give the folder of an EAGLE-3 head with "
            f"--speculative-draft-model-path."
        )
    load_format = server_args.speculative_draft_load_format or server_args.load_format
    _check_folder("--speculative-draft-model-path", path, load_format)
    config = Path(path) / "config.json"
    if not config.is_file():  # SGLang knows other places to look
        return
    architectures = json.loads(config.read_text()).get("architectures", [])
    if not any("eagle3" in name.lower() for name in architectures):
        raise LookaheadKVError(
            f"--speculative-draft-model-path must be the folder of an EAGLE-3 head that was trained for the model, got "
            f"{path} with architecture {', '.join(architectures) or 'unknown'}."
        )


def _check_drafts(server_args: Any) -> None:
    """Refuse speculation that does not draft chains, because the backends cannot verify anything else."""
    algorithm = algorithm_of(server_args)
    if algorithm not in (*_ALGORITHMS, DUAL_ALGORITHM if enabled(server_args) else None):
        raise _does_not_work_with(server_args, "speculative_algorithm")
    if algorithm is not None and server_args.enable_watermark:
        raise LookaheadKVError(
            f"{asked_by(server_args)} cannot watermark the tokens that {algorithm} speculates: remove "
            f"--enable-watermark or --speculative-algorithm."
        )
    path = server_args.speculative_draft_model_path
    if path is not None and algorithm != EAGLE3:
        raise LookaheadKVError(
            f"--speculative-draft-model-path {path} has no effect without --speculative-algorithm {EAGLE3}: add the "
            f"algorithm or remove the path."
        )
    steps = server_args.speculative_num_steps
    if algorithm == EAGLE3 and steps is not None and steps < 1:
        raise LookaheadKVError(f"--speculative-num-steps must be 1 or more, got {steps}.")
    tokens = server_args.speculative_num_draft_tokens
    if algorithm in (EAGLE3, NGRAM) and tokens is not None and tokens < 2:
        raise LookaheadKVError(
            f"--speculative-num-draft-tokens must be 2 or more, because it includes the newest token, got {tokens}."
        )
    wanted: dict[str, Any] = {"speculative_eagle_topk": 1}
    if algorithm == NGRAM:
        wanted = {"speculative_ngram_max_bfs_breadth": 1, "speculative_ngram_external_sam_budget": 0}
    for name, value in wanted.items():
        given = getattr(server_args, name)
        if given is not None and given != value:
            raise LookaheadKVError(
                f"{asked_by(server_args)} verifies chains of draft tokens, not the trees of {as_typed(name, given)}: "
                f"use {as_typed(name, value)}."
            )


def _has_sliding_window(text_config: Any) -> bool:
    # If the config has a sliding_window but no such layers, SGLang ignores the window (Mistral, Qwen2).
    return "sliding_attention" in (getattr(text_config, "layer_types", None) or ())


def _has_state_space(model: Any) -> bool:
    from sglang.srt.configs.hybrid_arch import mambaish_config
    from sglang.srt.configs.model_config import AttentionArch

    return model.attention_arch == AttentionArch.SSM or mambaish_config(model) is not None


def _check_memory(server_args: Any, model: Any, view: Any) -> None:
    """Refuse tiers that do not fit, which the scheduler would notice only after it has loaded the model."""
    layout = layout_of_model(server_args, model, dtypes.kv_dtype(view, model.dtype), view.tp_size, view.page_size)
    draft = draft_layout_of_flags(server_args, model, view)
    device_is_host = view.device == "cpu"
    budget = divide_memory(
        config_of(server_args, view.page_size),
        ranks=ranks_per_host(server_args),
        # The free memory of a GPU is known only in the scheduler, after the model is loaded.
        free_device_bytes=None if device_is_host else UNKNOWN,
    )
    if server_args.dp_size > 1:
        note_free_host_bytes()
    check_host_bytes(layout, budget.host_bytes, draft)
    layout.rows_in(budget.device_bytes, draft.row_bytes if draft else 0)


def _does_not_work_with(server_args: Any, field: str) -> LookaheadKVError:
    given = as_typed(field, getattr(server_args, field))
    return LookaheadKVError(f"{asked_by(server_args)} does not work with {given}: remove it.")
