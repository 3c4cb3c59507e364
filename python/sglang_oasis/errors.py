"""The two errors that reach a user of sglang-oasis: when starting a server, and when sending it a request."""

from __future__ import annotations


class LookaheadKVError(ValueError):
    """A configuration or an environment that sglang-oasis cannot serve.

    The message is one sentence: what is wrong, with which value, what to do.
    """


class RequestRefused(ValueError):
    """A request that the server cannot serve; HTTP status 400.

    The message is one sentence: what is wrong, with which value, what to do.
    """
