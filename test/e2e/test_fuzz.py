"""No request ends the server: whatever it says, it is served or refused, and leaves no row and no page behind.

`SGLANG_OASIS_FUZZ_EXAMPLES` and `SGLANG_OASIS_FUZZ_SEED` make it a longer or another hunt.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from sglang_oasis.reference_model import truncated_model_path
from sglang_oasis.testing.server import launch_server
from test.e2e.fuzzing import Call, calls
from test.e2e.small_pool import ENVIRONMENT, FLAGS, LAYERS, assert_baseline

pytestmark = pytest.mark.e2e

EXAMPLES = int(os.environ.get("SGLANG_OASIS_FUZZ_EXAMPLES", "60"))
SEED = int(os.environ.get("SGLANG_OASIS_FUZZ_SEED", "10"))
AT_ONCE = 4
FINE = {"text": "Once upon a time", "sampling_params": {"max_new_tokens": 2, "temperature": 0}}
GRAMMAR_WITHOUT_END = "Grammar accept_token failed"
"""SGLang's own answer, with status 500, where a grammar allows no token at all; only that request ends."""
SECONDS_PER_EXAMPLE = 20


@pytest.mark.timeout(300 + SECONDS_PER_EXAMPLE * EXAMPLES)
def test_no_request_ends_the_server(capsys: pytest.CaptureFixture[str]) -> None:
    """On a server of its own: some requests change what it does with those that follow."""
    with capsys.disabled():
        print(f" [fuzz: seed {SEED}, {EXAMPLES} examples of {AT_ONCE} requests at once]", flush=True)

    # A dead server fails each example that follows: nothing to shrink, the first one is the one to look at.
    @seed(SEED)
    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(st.tuples(*[calls] * AT_ONCE))
    def hunt(together: tuple[Call, ...]) -> None:
        with ThreadPoolExecutor(AT_ONCE) as pool:
            answers = list(pool.map(lambda call: call.send(server), together))
        failures = [answer.text for answer in answers if answer is not None and answer.status_code >= 500]
        assert all(GRAMMAR_WITHOUT_END in failure for failure in failures), failures
        fine = Call("/generate", FINE).send(server, timeout=60)
        assert fine is not None
        assert fine.ok, fine.text
        assert_baseline(server)

    with launch_server(*FLAGS, env=ENVIRONMENT, model=truncated_model_path(LAYERS)) as server:
        hunt()
