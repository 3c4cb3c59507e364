"""Tests of what runs on a GPU; --device cpu rehearses them: interpreted kernels, no side streams, no graphs."""

from __future__ import annotations

import os

import pytest

DEVICES = ("cuda", "cpu")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", choices=DEVICES, default="cuda", help="where the kernels run")
    parser.addoption("--tiny", action="store_true", help="few cases, as an interpreter has time for")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--device") == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported


@pytest.fixture(scope="session")
def place(request: pytest.FixtureRequest):
    """Where the kernels run."""
    import torch

    from test.cases.places import place_of

    device = torch.device(request.config.getoption("--device"))
    if device.type == "cuda" and not torch.cuda.is_available():
        pytest.skip("torch finds no GPU; scripts/gpu_check.sh says why, and --device cpu rehearses these tests")
    return place_of(torch.device("cuda", 0) if device.type == "cuda" else device)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """`seed`: one per case; a rehearsal has one case."""
    if "seed" in metafunc.fixturenames:
        metafunc.parametrize("seed", range(1 if metafunc.config.getoption("--tiny") else 4))
