"""Resolves command lines as the launcher does and prints, as JSON, what comes of each; run as a module.

One process for all of them, since importing SGLang takes most of the time.
"""

from __future__ import annotations

import json
import sys
from typing import Any

MARK = "RESOLVED "


def resolve(argv: list[str]) -> dict[str, Any]:
    """The resolved arguments of lookahead KV and of speculation, or the error."""
    from sglang.srt import server_args
    from sglang.srt.arg_groups.overrides import resolved_view

    try:
        arguments = server_args.prepare_server_args(argv)
        arguments.resolve_once()
    except Exception as error:
        return {"error": type(error).__name__, "message": str(error)}
    view = resolved_view(arguments)
    names = [name for name in arguments.__struct_fields__ if "lookahead_kv" in name or "speculative" in name]
    return {name: getattr(view, name) for name in names}


def main() -> None:
    """Argument: a JSON list of argument lists. Printed behind `MARK`: a JSON list of results."""
    from sglang.srt.plugins import load_plugins

    load_plugins()
    print(MARK + json.dumps([resolve(argv) for argv in json.loads(sys.argv[1])]))


if __name__ == "__main__":
    main()
