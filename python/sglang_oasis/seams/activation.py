"""When the seams are installed: as soon as both the plugins are loaded and a ServerArgs asks for one of our backends.

In the launcher the plugins are loaded first and the ServerArgs follows; in a child process the ServerArgs is unpickled
with the process's arguments, before the plugins are loaded. What is imported here inside of functions is imported then,
and never where nobody asks for our backends.
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
    """A ServerArgs that needs the seams exists in this process."""
    global _requested
    _requested = True
    _install_when_due()


def plugins_loaded() -> None:
    """SGLang has called the plugin's entry point in this process."""
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
    """Refuse, before SGLang looks at them, what cannot work with our backends."""
    from sglang_oasis.seams import preflight

    preflight.check_before_resolution(server_args)


def print_sentences() -> None:
    """Make an uncaught LookaheadKVError end the program with its sentence alone, without a traceback."""
    previous = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        if isinstance(error, LookaheadKVError):
            print(f"error: {error}", file=sys.stderr)
        else:
            previous(kind, error, traceback)

    sys.excepthook = hook
