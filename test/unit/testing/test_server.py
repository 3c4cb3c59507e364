"""A server of a test does not take the memory that others count on."""

from __future__ import annotations

import pytest

from sglang_oasis.testing.server import launch_server


def test_a_server_without_a_limit_of_its_pool_is_not_started() -> None:
    with pytest.raises(ValueError, match="needs one of --max-total-tokens"), launch_server("--dtype", "float32"):
        pass
