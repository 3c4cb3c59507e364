"""Fixtures shared by the end-to-end tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from sglang_oasis.reference_model import truncated_model_path
from test.e2e.server import Server, launch_server
from test.e2e.small_pool import FLAGS, LAYERS


@pytest.fixture(scope="session")
def small_pool_server() -> Iterator[Server]:
    """A fast server whose pools are too small for 16 long requests; every decode step checks every invariant."""
    environment = {
        "SGLANG_OASIS_CHECK_INTEGRITY": "1",
        "SGLANG_REQUEST_STATE_WAIT_TIMEOUT": "1",  # seconds until it looks whether a silent client is still there
        "OMP_NUM_THREADS": "1",  # the tensors are small, and threads that wait for each other on a busy core are slow
    }
    with launch_server(*FLAGS, env=environment, model=truncated_model_path(LAYERS)) as server:
        yield server
