"""What the flag changes of SGLang's own defaults."""

from __future__ import annotations

import pytest

from sglang_oasis.seams import resolution


@pytest.mark.parametrize("device", ["cuda", None])
def test_a_cuda_device_captures_decode_steps(device: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resolution, "cpu_platform_wanted", lambda: False)
    assert resolution.graph_defaults(device) == {}


@pytest.mark.parametrize("device", ["cpu", None])
def test_a_cpu_captures_nothing(device: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resolution, "cpu_platform_wanted", lambda: True)
    assert resolution.graph_defaults(device) == {"disable_cuda_graph": True}
