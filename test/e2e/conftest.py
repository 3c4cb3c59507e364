"""Fixtures shared by the end-to-end tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from sglang_oasis.reference_model import truncated_model_path
from test.e2e.processes import forked_starts
from test.e2e.server import Server, launch_server
from test.e2e.small_pool import ENVIRONMENT, FLAGS, LAYERS


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
