"""A value out of range, a port in use or a damaged model folder is refused with one sentence that names it."""

from __future__ import annotations

import json
import math
import re
import socket
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from sglang_oasis.config import AUTO_AUDIT_INTERVAL, DUAL_ALGORITHM, KNOBS, LookaheadKVConfig, Speculation
from sglang_oasis.errors import LookaheadKVError
from sglang_oasis.lookahead.selectors import SELECTORS
from sglang_oasis.lookahead.sources import SOURCES
from sglang_oasis.registry import Registry
from sglang_oasis.seams.launch_environment import check_model_folder, check_port, listen
from sglang_oasis.seams.preflight import check_device
from sglang_oasis.testing.ports import reserve_port

OUT_OF_RANGE: list[tuple[str, Any]] = [
    ("lookahead_kv_budget_tokens", 0),
    ("lookahead_kv_budget_tokens", -16),
    ("lookahead_kv_budget_tokens", 100),
    ("lookahead_kv_budget_tokens", 8),
    ("lookahead_kv_budget_tokens", 128.0),
    ("lookahead_kv_budget_tokens", "128"),
    ("lookahead_kv_budget_tokens", True),
    ("lookahead_kv_budget_tokens", None),
    ("lookahead_kv_recent_tokens", -1),
    ("lookahead_kv_recent_tokens", 1.5),
    ("lookahead_kv_sink_tokens", -1),
    ("lookahead_kv_sink_tokens", 2048),
    ("lookahead_kv_sink_tokens", 2033),
    ("lookahead_kv_fetch_ratio", 0),
    ("lookahead_kv_fetch_ratio", -0.1),
    ("lookahead_kv_fetch_ratio", 1.01),
    ("lookahead_kv_fetch_ratio", math.nan),
    ("lookahead_kv_fetch_ratio", math.inf),
    ("lookahead_kv_fetch_ratio", "half"),
    ("lookahead_kv_fetch_ratio", None),
    ("lookahead_kv_fetch_ratio", True),
    ("lookahead_kv_fetch_ratio", 10**400),
    ("lookahead_kv_smoothing", 1),
    ("lookahead_kv_smoothing", -0.1),
    ("lookahead_kv_smoothing", math.nan),
    ("lookahead_kv_smoothing", "auto"),
    ("lookahead_kv_miss_policy", "wait"),
    ("lookahead_kv_miss_policy", None),
    ("lookahead_kv_host_gb", 0),
    ("lookahead_kv_host_gb", -1),
    ("lookahead_kv_host_gb", math.nan),
    ("lookahead_kv_host_gb", math.inf),
    ("lookahead_kv_host_gb", "much"),
    ("lookahead_kv_host_gb", True),
    ("lookahead_kv_device_gb", 0.0),
    ("lookahead_kv_device_gb", math.nan),
    ("lookahead_kv_device_gb", -math.inf),
    ("lookahead_kv_dense_layers", "-1"),
    ("lookahead_kv_dense_layers", "0;1"),
    ("lookahead_kv_dense_layers", "first"),
    ("lookahead_kv_summary_dtype", "fp8"),
    ("lookahead_kv_summary_dtype", 4),
    ("lookahead_kv_calibration", ""),
    ("lookahead_kv_calibration", True),
    ("lookahead_kv_dense_layers", "1.5"),
    ("lookahead_kv_dense_layers", "²"),
    ("lookahead_kv_dense_layers", [-1]),
    ("lookahead_kv_audit_interval", -1),
    ("lookahead_kv_audit_interval", 1.5),
    ("lookahead_kv_reject_drafts", "no"),
]


def refusal(action: Callable[[], Any]) -> str:
    """The sentence with which `action` is refused."""
    with pytest.raises(LookaheadKVError) as caught:
        action()
    sentence = str(caught.value)
    assert sentence.endswith(".")
    assert "\n" not in sentence
    return sentence


@pytest.mark.parametrize(("name", "value"), OUT_OF_RANGE)
def test_a_value_out_of_range_is_refused_by_name(name: str, value: Any) -> None:
    flag = "--" + name.replace("_", "-")
    sentence = refusal(lambda: LookaheadKVConfig.from_flags({name: value}))
    assert sentence.startswith(f"{flag} must be ")
    assert sentence.endswith(f", got {value}.")


def test_every_knob_has_a_refused_value() -> None:
    looked_up = {"lookahead_kv_selector", "lookahead_kv_source"}
    assert {knob.name for knob in KNOBS} == looked_up | {name for name, _ in OUT_OF_RANGE}


def test_the_defaults_are_those_of_the_papers_and_of_our_own_selector_study() -> None:
    config = LookaheadKVConfig.from_flags({})
    assert (config.selected_blocks, config.block_size, config.fetch_ratio) == (128, 16, 0.05)
    assert (config.recent_blocks, config.sink_blocks, config.dense_layers) == (1, 1, ())
    assert (config.source, config.miss_policy) == ("last-query", "drop")
    assert (config.selector, config.summary_dtype) == ("midrange", "int4")
    assert config.host_gb is config.device_gb is None


def test_auto_leaves_the_cap_open_and_turns_the_audit_on() -> None:
    config = LookaheadKVConfig.from_flags({"lookahead_kv_fetch_ratio": "auto", "lookahead_kv_miss_policy": "auto"})
    assert (config.fetch_ratio, config.miss_policy, config.audit_interval) == (None, "auto", AUTO_AUDIT_INTERVAL)
    asked = {"lookahead_kv_miss_policy": "auto", "lookahead_kv_audit_interval": 3}
    assert LookaheadKVConfig.from_flags(asked).audit_interval == 3
    draft = config.of_draft_model()
    assert (draft.fetch_ratio, draft.miss_policy, draft.audit_interval) == (0.05, "drop", 0)


def sourced(source: str, algorithm: str | None, drafts: int = 3, **flags: Any) -> LookaheadKVConfig:
    flags = {"lookahead_kv_source": source, **flags}
    return LookaheadKVConfig.from_flags(flags, 8, Speculation(algorithm, drafts if algorithm else 0))


def test_the_source_is_what_the_server_speculates_with() -> None:
    resolved = [sourced("auto", algorithm).source for algorithm in (None, "EAGLE3", "NGRAM", DUAL_ALGORITHM)]
    assert resolved == ["last-query", "draft", "draft", "dual"]
    assert sourced("last-query", "EAGLE3").source == "last-query"
    assert "does not work with --speculative-algorithm NGRAM: remove" in refusal(lambda: sourced("dual", "NGRAM"))
    assert "needs drafts: add --speculative-algorithm" in refusal(lambda: sourced("draft", None))


@pytest.mark.parametrize(("source", "algorithm"), [("auto", None), ("dual", None), ("auto", DUAL_ALGORITHM)])
def test_rejecting_drafts_where_there_are_none_is_refused(source: str, algorithm: str | None) -> None:
    rejects: dict[str, Any] = {"lookahead_kv_reject_drafts": True}
    assert "--lookahead-kv-reject-drafts has no effect" in refusal(lambda: sourced(source, algorithm, **rejects))
    assert sourced("auto", "NGRAM", **rejects).reject_drafts


def test_drafts_that_do_not_fit_the_local_slots_are_refused() -> None:
    assert sourced("draft", "NGRAM", 7).draft_tokens == 7
    sentence = refusal(lambda: sourced("draft", "NGRAM", 8))
    assert "must be at most a page of 8 tokens with --enable-lookahead-kv, got 9." in sentence
    no_recent_page = {"lookahead_kv_recent_tokens": 0}
    sentence = refusal(lambda: sourced("draft", "NGRAM", 3, **no_recent_page))
    assert sentence == "--lookahead-kv-recent-tokens must be 1 or more with speculation, got 0."


@pytest.mark.parametrize("block_size", [0, 1, 4, 12, 64])
def test_a_page_size_without_kernels_is_refused(block_size: int) -> None:
    sentence = refusal(lambda: LookaheadKVConfig.from_flags({}, block_size))
    assert sentence == f"--page-size must be one of 8, 16, 32 with sglang-oasis, got {block_size}."


@pytest.mark.parametrize(("registry", "flag"), [(SELECTORS, "selector"), (SOURCES, "source")])
def test_a_name_that_is_not_registered_is_refused(registry: Registry[Any], flag: str) -> None:
    sentence = refusal(lambda: registry.find("psychic"))
    assert sentence == f"--lookahead-kv-{flag} must be one of {', '.join(registry.names())}, got psychic."


def test_a_dense_layer_that_the_model_lacks_is_refused() -> None:
    config = LookaheadKVConfig.from_flags({"lookahead_kv_dense_layers": "0,3"})
    config.check_layers(4)
    assert refusal(lambda: config.check_layers(3)) == (
        "--lookahead-kv-dense-layers must be layers of the model, 0 to 2, got 3."
    )


@pytest.mark.parametrize("listens_on", ["127.0.0.1", "0.0.0.0"])
def test_a_port_in_use_is_refused(listens_on: str) -> None:
    with socket.create_server((listens_on, 0)) as listener:
        port = listener.getsockname()[1]
        assert f"port {port} on 127.0.0.1 cannot be used" in refusal(lambda: check_port("127.0.0.1", port))
    check_port("127.0.0.1", port)


@pytest.mark.parametrize("port", [-1, 65_536])
def test_a_port_that_does_not_exist_is_refused(port: int) -> None:
    assert f"port {port}" in refusal(lambda: check_port("127.0.0.1", port))


def test_a_host_that_is_not_this_machine_is_refused() -> None:
    assert "192.0.2.1" in refusal(lambda: check_port("192.0.2.1", 0))


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "0.0.0.0"])
def test_a_port_is_taken_from_when_it_listens(host: str) -> None:
    port = reserve_port()
    listening = listen(host, port, 5)
    try:
        socket.create_connection(("127.0.0.1", port), timeout=5).close()
        assert f"port {port} on {host} cannot be used" in refusal(lambda: listen(host, port, 5))
    finally:
        for each in listening:
            each.close()
    for each in listen(host, port, 5):
        each.close()


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    """Two shards with an index."""
    (tmp_path / "config.json").write_text("{}")
    shards = {f"model-{i}.safetensors": {f"weight.{i}": torch.ones(64)} for i in range(2)}
    for name, tensors in shards.items():
        save_file(tensors, tmp_path / name)
    weight_map = {tensor: name for name, tensors in shards.items() for tensor in tensors}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    check_model_folder(tmp_path)
    return tmp_path


@pytest.mark.parametrize("left", [0, 4, 8, 40, -1])
def test_a_shard_that_is_cut_short_is_refused(model_folder: Path, left: int) -> None:
    shard = model_folder / "model-1.safetensors"
    shard.write_bytes(shard.read_bytes()[:left])
    assert refusal(lambda: check_model_folder(model_folder)).startswith(f"the model file {shard} is damaged (")


def test_a_single_file_that_is_cut_short_is_refused(model_folder: Path) -> None:
    (model_folder / "model.safetensors.index.json").unlink()
    shard = model_folder / "model-1.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    assert f"{shard} is damaged" in refusal(lambda: check_model_folder(model_folder))


def test_a_missing_shard_is_refused(model_folder: Path) -> None:
    (model_folder / "model-0.safetensors").unlink()
    assert "model-0.safetensors is damaged (missing)" in refusal(lambda: check_model_folder(model_folder))


@pytest.mark.parametrize("index", ["{", "[]", "{}", '{"weight_map": 3}'])
def test_a_damaged_index_is_refused(model_folder: Path, index: str) -> None:
    (model_folder / "model.safetensors.index.json").write_text(index)
    assert "not a valid shard index" in refusal(lambda: check_model_folder(model_folder))


def test_a_folder_without_weights_is_refused(model_folder: Path) -> None:
    for file in model_folder.glob("*.safetensors*"):
        file.unlink()
    assert "has no weights" in refusal(lambda: check_model_folder(model_folder))
    check_model_folder(model_folder, weights=False)


def test_a_folder_without_configuration_is_refused(model_folder: Path) -> None:
    (model_folder / "config.json").unlink()
    assert "config.json is missing in" in refusal(lambda: check_model_folder(model_folder))


def test_a_refusal_names_the_flag_that_named_the_folder(tmp_path: Path) -> None:
    flag = "--speculative-draft-model-path"
    assert refusal(lambda: check_model_folder(tmp_path, flag=flag)).endswith(f"check {flag}.")


@pytest.mark.parametrize("config", [b"", b'{"hidden_size": 64', b"\xff\xfe"])
def test_a_damaged_configuration_is_refused(model_folder: Path, config: bytes) -> None:
    (model_folder / "config.json").write_bytes(config)
    assert "config.json is damaged (not valid JSON)" in refusal(lambda: check_model_folder(model_folder))


def cuda_server(
    graphs: str = "full", head_dim: int = 128, algorithm: str | None = None, **flags: Any
) -> tuple[Any, Any, Any]:
    """ServerArgs, model and resolved arguments, as far as what a CUDA device can do depends on them."""
    values = {knob.name: knob.default for knob in KNOBS} | flags
    args = SimpleNamespace(
        enable_lookahead_kv=True,
        speculative_algorithm=algorithm,
        speculative_num_steps=None,
        speculative_num_draft_tokens=None,
        speculative_eagle_topk=None,
        **values,
    )
    phases = SimpleNamespace(decode=SimpleNamespace(backend=graphs), prefill=SimpleNamespace(backend="breakable"))
    view = SimpleNamespace(device="cuda", page_size=16, speculative_algorithm=algorithm, cuda_graph_config=phases)
    return args, SimpleNamespace(head_dim=head_dim), view


@pytest.mark.parametrize(
    ("server", "named"),
    [
        ({"lookahead_kv_miss_policy": "auto"}, "--lookahead-kv-miss-policy auto"),
        ({"lookahead_kv_fetch_ratio": "auto"}, "--lookahead-kv-fetch-ratio auto"),
        ({"lookahead_kv_audit_interval": 8}, "--lookahead-kv-audit-interval"),
        ({"head_dim": 72}, "heads of 72"),
        ({"head_dim": 512}, "heads of 512"),
    ],
)
def test_what_a_cuda_device_does_not_do_yet_is_refused(server: dict[str, Any], named: str) -> None:
    with pytest.raises(LookaheadKVError, match=re.escape(named)) as caught:
        check_device(*cuda_server(**server))
    assert str(caught.value).count(". ") == 0
    assert str(caught.value).endswith(".")


def test_a_cuda_device_serves_the_defaults_with_and_without_graphs() -> None:
    check_device(*cuda_server())
    check_device(*cuda_server(graphs="disabled"))


def test_a_trace_does_not_go_with_graphs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SGLANG_OASIS_TRACE_DIR", str(tmp_path))
    check_device(*cuda_server(graphs="disabled"))
    with pytest.raises(LookaheadKVError, match="--disable-cuda-graph"):
        check_device(*cuda_server())


@pytest.mark.parametrize(("phase", "backend"), [("decode", "breakable"), ("prefill", "full")])
def test_graphs_of_other_kinds_are_refused(phase: str, backend: str) -> None:
    args, model, view = cuda_server()
    getattr(view.cuda_graph_config, phase).backend = backend
    with pytest.raises(LookaheadKVError, match=f"--cuda-graph-backend-{phase} {backend}"):
        check_device(args, model, view)
