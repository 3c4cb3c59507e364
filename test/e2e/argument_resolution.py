"""Resolves command lines as the launcher does and prints, as JSON, what comes of each; run as a module.

One process for all of them, since importing SGLang takes most of the time.
"""

from __future__ import annotations

import json
import sys
from typing import Any


def resolve(argv: list[str]) -> dict[str, Any]:
    """The resolved lookahead KV arguments, or the error."""
    from sglang.srt import server_args

    try:
        arguments = server_args.prepare_server_args(argv)
        arguments.resolve_once()
    except Exception as error:
        return {"error": type(error).__name__, "message": str(error)}
    return {name: value for name, value in vars_of(arguments).items() if "lookahead_kv" in name}


def vars_of(arguments: Any) -> dict[str, Any]:
    return {name: getattr(arguments, name) for name in arguments.__struct_fields__}


def main() -> None:
    """Standard input: a JSON list of argument lists. Last line of standard output: a JSON list of results."""
    from sglang.srt.plugins import load_plugins

    load_plugins()
    print(json.dumps([resolve(argv) for argv in json.load(sys.stdin)]))


if __name__ == "__main__":
    main()
