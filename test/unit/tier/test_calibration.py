"""Calibrations: their files, whose they are, and what they do for keys with outlier coordinates."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_oasis import calibrate
from sglang_oasis.config import AUTO, NONE, LookaheadKVConfig
from sglang_oasis.errors import LookaheadKVError
from sglang_oasis.ops.summary import SUMMARY_FORMATS, KeyStatistics, SummaryFormat, block_scores, summarise, vectors
from sglang_oasis.reference_model import truncated_model_path
from sglang_oasis.seams.calibration import calibration_of
from sglang_oasis.tier.calibration import Calibration, file_name, model_hash
from test.cases.kernel_cases import records_of

INT4 = SUMMARY_FORMATS["int4"]
LAYERS, HEADS, DIM = 2, 3, 16


def some_calibration(model: str = "0123456789abcdef", seed: int = 0) -> Calibration:
    rng = torch.Generator().manual_seed(seed)
    layers = [KeyStatistics(*torch.rand(3, HEADS, DIM, generator=rng)) for _ in range(LAYERS)]
    looseness = torch.tensor([0.5, 0.75])
    return Calibration(model, 16, layers, looseness, captured=0.9, uncalibrated=0.8, context=2048, budget=512)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"weights")
    return folder


def model_config(folder: Path) -> Any:
    return SimpleNamespace(
        model_path=str(folder),
        get_total_num_kv_heads=lambda: HEADS,
        num_attention_layers=LAYERS,
        head_dim=DIM,
    )


def asking_for(calibration: str) -> LookaheadKVConfig:
    return LookaheadKVConfig.from_flags({"lookahead_kv_calibration": calibration})


def test_a_calibration_is_read_as_it_was_written(tmp_path: Path) -> None:
    written = some_calibration()
    written.save(tmp_path / "a.safetensors")
    read = Calibration.load(tmp_path / "a.safetensors")
    assert vars(read) | {"layers": 0, "looseness": 0} == vars(written) | {"layers": 0, "looseness": 0}
    for mine, theirs in zip(read.scalings(0, 1), written.scalings(0, 1), strict=True):
        assert torch.equal(mine, theirs)
    assert [file.name for file in tmp_path.iterdir()] == ["a.safetensors"]


@pytest.mark.parametrize(("rank", "ranks", "heads"), [(0, 1, [0, 1, 2]), (0, 3, [0]), (2, 3, [2])])
def test_each_rank_gets_its_own_heads(rank: int, ranks: int, heads: list[int]) -> None:
    calibration = some_calibration()
    for mine, every in zip(calibration.scalings(rank, ranks), calibration.scalings(0, 1), strict=True):
        assert torch.equal(mine, every[heads])


def test_what_is_packed_undoes_itself_and_is_finite_for_constant_keys() -> None:
    zero, spread, reach = torch.randn(HEADS, DIM), torch.rand(HEADS, DIM), torch.zeros(HEADS, DIM)
    spread[0, 0] = 1e-9
    packed = KeyStatistics(zero, spread, reach).packed(0.5)
    assert packed[0, 3, 0] == pytest.approx(0.05 * float(spread[0].square().mean().sqrt()))
    assert torch.equal(packed[:, 0], zero)
    torch.testing.assert_close(packed[:, 1] * packed[:, 3], torch.ones(HEADS, DIM))
    torch.testing.assert_close(packed[:, 2] * packed[:, 4], torch.full((HEADS, DIM), 0.5))
    assert packed.isfinite().all()


def test_statistics_are_those_of_loops_over_blocks() -> None:
    keys = torch.randn(5, HEADS, 4, DIM)  # [N, H, B, D]
    found = KeyStatistics.of(keys)
    for head in range(HEADS):
        for d in range(DIM):
            middles = [(keys[n, head, :, d].max() + keys[n, head, :, d].min()) / 2 for n in range(5)]
            ranges = [(keys[n, head, :, d].max() - keys[n, head, :, d].min()) / 2 for n in range(5)]
            zero = sum(middles) / 5
            assert found.zero[head, d] == pytest.approx(float(zero), abs=1e-6)
            spread = (sum((middle - zero) ** 2 for middle in middles) / 5) ** 0.5
            assert found.spread[head, d] == pytest.approx(float(spread), abs=1e-6)
            assert found.reach[head, d] == pytest.approx(float(sum(ranges) / 5), abs=1e-6)


def test_outlier_coordinates_cost_nothing_relative_to_the_statistics() -> None:
    torch.manual_seed(0)
    keys = torch.randn(64, 1, 16, 32)  # [N, H, B, D]
    keys[..., 3] += 60  # what a bias on the keys does
    keys[..., 5] *= 20
    query = torch.randn(1, 8, 1, 32)
    query[..., 5] = 0
    exact = block_scores.reference(
        query, summarise(keys, SUMMARY_FORMATS["bf16"]).transpose(0, 1)[None], SUMMARY_FORMATS["bf16"],
        torch.tensor([64]), 0.3, 0.5,
    )  # fmt: skip

    def overlap(fmt: SummaryFormat) -> int:
        scores = block_scores.reference(
            query, records_of(keys.transpose(0, 1)[None], fmt), fmt, torch.tensor([64]), 0.3, 0.5
        )
        return len(set(scores.topk(16).indices.flatten().tolist()) & set(exact.topk(16).indices.flatten().tolist()))

    assert overlap(SummaryFormat("int4", 4, KeyStatistics.of(keys).packed())) >= 14
    assert overlap(INT4) <= 10


def test_records_say_what_the_keys_are_with_statistics_too() -> None:
    keys = torch.randn(2, HEADS, 7, 8, DIM)
    fmt = SummaryFormat("int8", 8, KeyStatistics.of(keys[0].transpose(0, 1)).packed(looseness=0.5))
    found = vectors(records_of(keys, fmt), fmt)
    low, high = keys.aminmax(dim=-2)
    torch.testing.assert_close(found[..., 0, :], (low + high) / 2, atol=0.05, rtol=0)
    torch.testing.assert_close(found[..., 1, :], (high - low) / 2, atol=0.05, rtol=0)


def test_a_model_is_known_by_its_configuration_and_its_weights(model: Path) -> None:
    before = model_hash(model)
    (model / "README.md").write_text("whatever")
    assert model_hash(model) == before
    (model / "config.json").write_text('{"a": 1}')
    other = model_hash(model)
    (model / "model.safetensors").write_bytes(b"other weights")
    assert len({before, other, model_hash(model)}) == 3
    (model / "model.safetensors").unlink()
    with pytest.raises(LookaheadKVError, match=r"must be a folder with a config.json and weights"):
        model_hash(model)


def test_the_calibration_in_the_cache_is_found(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OASIS_CACHE", str(tmp_path / "cache"))
    assert calibration_of(asking_for(AUTO), model_config(model), 1) is None
    file = tmp_path / "cache" / "calibration" / file_name(model_hash(model), 16)
    file.parent.mkdir(parents=True)
    some_calibration(model_hash(model)).save(file)
    found = calibration_of(asking_for(AUTO), model_config(model), 3)
    assert found is not None
    assert found.model == model_hash(model)
    assert calibration_of(asking_for(str(file)), model_config(model), 3) is found
    assert calibration_of(asking_for(NONE), model_config(model), 3) is None
    hub_name = SimpleNamespace(model_path="someone/some-model")
    assert calibration_of(asking_for(AUTO), hub_name, 1) is None
    (model / "model.safetensors").unlink()  # weights that SGLang makes up need none
    assert calibration_of(asking_for(AUTO), model_config(model), 1) is None


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"no calibration", "must be a calibration that python -m sglang_oasis.calibrate wrote"),
        (None, "must be a calibration"),
        (some_calibration("f" * 16), "must be of model .*, got ffffffffffffffff: run python -m sglang_oasis.calibrate"),
    ],
)
def test_bad_and_foreign_files_get_one_sentence(
    content: Any, sentence: str, model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setenv("OASIS_CACHE", str(tmp_path / "cache"))
    file = tmp_path / "cache" / "calibration" / file_name(model_hash(model), 16)
    file.parent.mkdir(parents=True)
    if isinstance(content, Calibration):
        content.save(file)
    elif content is not None:
        file.write_bytes(content)
    with pytest.raises(LookaheadKVError, match=sentence):
        calibration_of(asking_for(str(file)), model_config(model), 1)
    if content is not None:  # in the cache it is passed over
        assert calibration_of(asking_for(AUTO), model_config(model), 1) is None
        assert "The model is served without a calibration" in caplog.text


def test_another_shape_is_refused(model: Path) -> None:
    with pytest.raises(LookaheadKVError, match=r"layers, KV heads and head size \(4, 3, 16\), got \(2, 3, 16\)"):
        some_calibration().check("0123456789abcdef", 16, 4, HEADS, DIM, 1)
    with pytest.raises(LookaheadKVError, match="must be of page size 32, got 16"):
        some_calibration().check("0123456789abcdef", 32, LAYERS, HEADS, DIM, 1)
    with pytest.raises(LookaheadKVError, match="as many ranks as divide 3 KV heads, got 2"):
        some_calibration().check("0123456789abcdef", 16, LAYERS, HEADS, DIM, 2)


def test_a_model_is_calibrated_from_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OASIS_CACHE", str(tmp_path))
    folder = truncated_model_path(4)
    assert calibrate.main([str(folder)]) == 0
    said = capsys.readouterr().out
    (file,) = (tmp_path / "calibration").iterdir()
    assert str(file) in said
    found = Calibration.load(file)
    found.check(model_hash(folder), 16, 4, 3, 64, 1)
    assert found.captured > found.uncalibrated > 0.5
    assert f"{100 * found.captured:.1f}% of the attention mass" in said


def test_calibrating_what_is_no_model_gets_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert calibrate.main([str(tmp_path)]) == 1
    assert capsys.readouterr().err == f"The model must be a folder with a config.json and weights, got {tmp_path}.\n"
