"""The one error type that reaches a user of sglang-oasis."""

from __future__ import annotations


class LookaheadKVError(ValueError):
    """A configuration or an environment that sglang-oasis cannot serve.

    The message is one sentence: what is wrong, with which value, what to do.
    """
