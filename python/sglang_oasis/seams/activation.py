"""Installs the seams as soon as SGLang has loaded the plugins and a ServerArgs asks for one of our backends.

In the launcher the plugins are loaded first and the ServerArgs follows; in a child process the ServerArgs is unpickled
with the process's arguments, before the plugins are loaded. The imports inside of functions run only then, and never in
a server without our backends.
"""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Any

from sglang_oasis.errors import LookaheadKVError

_requested = False
_plugins_loaded = False
_installed = False


def request() -> None:
    """Note that a ServerArgs which needs the seams exists in this process; install the seams if possible."""
    global _requested
    _requested = True
    _install_when_due()


def plugins_loaded() -> None:
    """Note that SGLang has called the plugin's entry point in this process; install the seams if they are needed."""
    global _plugins_loaded
    _plugins_loaded = True
    _install_when_due()


def _install_when_due() -> None:
    global _installed
    if _installed or not (_requested and _plugins_loaded):
        return
    _installed = True
    from sglang_oasis.seams import catalogue

    catalogue.install()
    print_sentences()


def check_before_resolution(server_args: Any) -> None:
    """Refuse arguments that cannot work with our backends, before SGLang reads them."""
    from sglang_oasis.seams import preflight

    preflight.check_before_resolution(server_args)


def print_sentences() -> None:
    """Make an uncaught LookaheadKVError end the program with its message only, without a traceback."""
    previous = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        if isinstance(error, LookaheadKVError):
            print(f"error: {error}", file=sys.stderr)
        else:
            previous(kind, error, traceback)

    sys.excepthook = hook
