"""A hook on a symbol of SGLang, and the error for one that is not in place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sglang_oasis import SUPPORTED_SGLANG_VERSION
from sglang_oasis.errors import LookaheadKVError

_PACKAGES = ("sglang", "multiprocessing", "uvicorn")


@dataclass(frozen=True)
class Seam:
    """A hook on an SGLang symbol.

    Attributes:
        target: dotted path below `sglang.srt`, or a full path that begins with `sglang` or a dependency of SGLang.
        hook: the hook function, with the signature that SGLang prescribes for `kind`.
        kind: "BEFORE", "AFTER", "AROUND" or "REPLACE".
    """

    target: str
    hook: Callable[..., Any]
    kind: str

    @property
    def path(self) -> str:
        return self.target if self.target.split(".")[0] in _PACKAGES else f"sglang.srt.{self.target}"


def not_installed(what: str) -> LookaheadKVError:
    """Return the error for a hook or another part of ours that could not be installed in SGLang."""
    return LookaheadKVError(
        f"sglang-oasis cannot start: {what} could not be installed; install "
        f"sglang=={SUPPORTED_SGLANG_VERSION}, or remove the plugin that replaces it."
    )
