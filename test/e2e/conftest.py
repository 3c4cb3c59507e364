"""Fixtures shared by the end-to-end tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sglang_oasis.reference_model import truncated_model_path
from sglang_oasis.testing.processes import forked_starts
from sglang_oasis.testing.server import Server, launch_server
from test.e2e.sampling_cases import CASES, ask
from test.e2e.small_pool import ENVIRONMENT, FLAGS, LAYERS
from test.e2e.sources import SOURCES, flags_of, write_untrained_head

LONGEST = (
    *("test_equals_stock", "test_speculation", "test_sparse_against_reference", "test_models", "test_soak"),
    *("test_sampling", "test_tensor_parallel", "test_termination", "test_device_path", "test_capacity"),
    *("test_trained_head", "test_request_life"),
)
"""Files that come first, so that no process is left with a long one while the others have nothing to do."""


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    ranks = {name: rank for rank, name in enumerate(LONGEST)}
    items.sort(key=lambda item: ranks.get(item.path.stem, len(ranks)))


@pytest.fixture(scope="session", autouse=True)
def forked() -> Iterator[None]:
    """Servers do not import everything anew."""
    with forked_starts():
        yield


@pytest.fixture(scope="session")
def small_pool_server() -> Iterator[Server]:
    """A fast server whose pools are too small for 16 long requests; every decode step checks every invariant."""
    with launch_server(*FLAGS, env=ENVIRONMENT, model=truncated_model_path(LAYERS)) as server:
        yield server


@pytest.fixture(scope="session")
def sampled_without(small_pool_server: Server) -> dict[str, dict[str, Any]]:
    """Answers without speculation, one at a time."""
    return {name: ask(small_pool_server, name) for name in CASES}


@pytest.fixture(scope="session")
def untrained_head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_untrained_head(tmp_path_factory.mktemp("head"))


@pytest.fixture(scope="session", params=SOURCES)
def source(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="session")
def source_server(source: str, untrained_head: Path) -> Iterator[Server]:
    """The small pool with speculation; pytest runs the tests of one source after the other."""
    flags = (*flags_of(source, untrained_head), "--constrained-json-disable-any-whitespace")
    with launch_server(*FLAGS, *flags, env=ENVIRONMENT, model=truncated_model_path(LAYERS)) as running:
        yield running
