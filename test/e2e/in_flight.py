"""One /generate request on a connection of its own: it can be waited for, watched, and dropped in mid-air."""

from __future__ import annotations

import http.client
import json
import socket
from typing import Any
from urllib.parse import urlsplit

from sglang_oasis.testing.server import ANSWER_TIMEOUT, Server


class InFlight:
    """A request that the server has been sent; sending does not wait for the answer.

    Args:
        server: the server.
        prompt: token ids.
        max_new_tokens: tokens to generate.
        stream: answer token by token.
        sampling: more sampling parameters; greedy unless they say otherwise.
        request: top-level fields, e.g. `rid` or `priority`.
    """

    def __init__(
        self,
        server: Server,
        prompt: list[int],
        max_new_tokens: int,
        *,
        stream: bool = False,
        sampling: dict[str, Any] | None = None,
        **request: Any,
    ) -> None:
        body = {
            "input_ids": prompt,
            "sampling_params": {
                "max_new_tokens": max_new_tokens,
                "temperature": 0,
                **(sampling or {}),
            },
            "stream": stream,
            **request,
        }
        address = urlsplit(server.url)
        self._connection = http.client.HTTPConnection(str(address.hostname), address.port, timeout=ANSWER_TIMEOUT)
        self._connection.request("POST", "/generate", json.dumps(body), {"Content-Type": "application/json"})
        self._stream: http.client.HTTPResponse | None = None

    def result(self) -> dict[str, Any]:
        """Wait for the whole answer of a request that does not stream."""
        response = self._connection.getresponse()
        text = response.read().decode()
        self._connection.close()
        if response.status != 200:
            raise RuntimeError(f"/generate answered {response.status}: {text}")
        return json.loads(text)

    def wait_for_tokens(self, count: int) -> None:
        """Read a stream until `count` tokens have come."""
        if self._stream is None:
            self._stream = self._connection.getresponse()
        for line in self._stream:
            if line.startswith(b"data: {") and json.loads(line[6:])["meta_info"]["completion_tokens"] >= count:
                return
        raise RuntimeError(f"the stream ended before it had {count} tokens")

    def disconnect(self) -> None:
        """Close the connection without reading on."""
        assert self._connection.sock is not None
        # A response object keeps the file descriptor open: shut the connection down, whoever holds it.
        self._connection.sock.shutdown(socket.SHUT_RDWR)
        self._connection.close()
