"""Flags: a subclass of SGLang's ServerArgs with one field per knob.

Read from sglang 0.5.23: `server_args.ServerArgs` (a msgspec Struct), `arg_groups/arg_utils.Arg`,
`entrypoints/engine.Engine.server_args_class`. REPLACE, because fields can only be added by a subclass; the class
attribute of Engine is not a module binding, so the hook registry does not reach it and it is set here. When upstream
lets plugins declare fields, use that.
"""

from __future__ import annotations

import argparse
from typing import Annotated, Any

import msgspec
from sglang.srt import server_args as upstream
from sglang.srt.arg_groups.arg_utils import Arg
from sglang.srt.arg_groups.choices import ATTENTION_BACKEND_CHOICES

from sglang_oasis.config import DENSE_BACKEND_NAME, ENABLE_FLAG, KNOBS, Knob
from sglang_oasis.errors import LookaheadKVError
from sglang_oasis.seams import activation
from sglang_oasis.seams.flags import uses_host_pool

HELP_HEADING = "lookahead KV (sglang-oasis)"
SLEEP_HELP = (
    "Reduce CPU usage when sglang is idle. On by default with --enable-lookahead-kv or --attention-backend "
    f"{DENSE_BACKEND_NAME} on a CPU: `--sleep-on-idle false` makes it poll."
)
ENABLE_HELP = (
    "Keep the full KV cache in host memory and decode on a bounded working set per KV head; every flag below needs it."
)


def _upstream() -> Any:
    """Return SGLang's own class; not a module variable, because the REPLACE hook rewrites all bindings of the class."""
    return ServerArgs.__base__


def _field(name: str, help_text: str, default: Any) -> tuple[str, Any, Any]:
    # no_cli, because `add_cli_args` registers the flags under a heading of their own.
    return name, Annotated[Any, Arg(help=help_text, no_cli=True)], default


class _Behaviour:
    """The methods of the subclass, which are copied as plain functions into the Struct's namespace."""

    def __post_init__(self: Any) -> None:
        _upstream().__post_init__(self)
        if uses_host_pool(self):
            activation.request()
        elif self.sleep_on_idle is None:
            self.sleep_on_idle = False  # as upstream

    def resolve_once(self: Any) -> None:
        if not getattr(self, "_resolution_finished", False):
            if not self.enable_lookahead_kv:
                _refuse_flags_without_effect(self)
            _refuse_half_a_backend(self)
            if uses_host_pool(self):
                activation.check_before_resolution(self)
        _upstream().resolve_once(self)

    @staticmethod
    def add_cli_args(parser: argparse.ArgumentParser) -> None:
        if DENSE_BACKEND_NAME not in ATTENTION_BACKEND_CHOICES:
            ATTENTION_BACKEND_CHOICES.append(DENSE_BACKEND_NAME)
        _upstream().add_cli_args(parser)
        _make_sleeping_a_choice(parser)
        group = parser.add_argument_group(HELP_HEADING)
        group.add_argument("--enable-lookahead-kv", action="store_true", help=ENABLE_HELP)
        for knob in KNOBS:
            if knob.parse is bool:
                group.add_argument(knob.flag, action="store_true", help=knob.help)
                continue
            group.add_argument(
                knob.flag, type=_parser_of(knob), choices=knob.choices, default=knob.default, help=knob.help
            )


def _make_sleeping_a_choice(parser: argparse.ArgumentParser) -> None:
    """Let --sleep-on-idle take a value: upstream's flag can only turn sleeping on, but our default on a CPU is on.

    SGLang's YAML reader passes true and false to a flag that takes a value, and drops `false` for other flags.
    """
    handler, parser.conflict_handler = parser.conflict_handler, "resolve"
    parser.add_argument(
        "--sleep-on-idle", nargs="?", const=True, default=None, type=_truth, metavar="true|false", help=SLEEP_HELP
    )
    parser.conflict_handler = handler


def _truth(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise argparse.ArgumentTypeError(f"must be true or false, got {text}")
    return text.lower() == "true"


def _refuse_flags_without_effect(server_args: Any) -> None:
    for knob in KNOBS:
        if getattr(server_args, knob.name) != knob.default:
            activation.print_sentences()
            raise LookaheadKVError(
                f"{knob.flag} has no effect without --enable-lookahead-kv: add that flag or remove {knob.flag}."
            )


def _refuse_half_a_backend(server_args: Any) -> None:
    for phase in ("prefill", "decode"):
        if getattr(server_args, f"{phase}_attention_backend") == DENSE_BACKEND_NAME:
            activation.print_sentences()
            raise LookaheadKVError(
                f"--{phase}-attention-backend cannot be {DENSE_BACKEND_NAME}: use --attention-backend "
                f"{DENSE_BACKEND_NAME}, which serves both phases."
            )


def _parser_of(knob: Knob) -> Any:
    def parse(text: str) -> Any:
        return knob.parse(text)

    parse.__name__ = "number" if knob.parse is not str else "value"  # argparse shows this name in its errors
    return parse


ServerArgs: Any = msgspec.defstruct(
    "ServerArgs",
    [
        _field(ENABLE_FLAG, ENABLE_HELP, False),
        *(_field(knob.name, knob.help, knob.default) for knob in KNOBS),
        _field("sleep_on_idle", SLEEP_HELP, None),  # None: not given; keeps the position of upstream's field
    ],
    bases=(upstream.ServerArgs,),
    namespace={name: vars(_Behaviour)[name] for name in ("__post_init__", "resolve_once", "add_cli_args")},
    module=__name__,
    dict=True,
)


def install() -> None:
    """Replace SGLang's ServerArgs by the subclass; SGLang applies the hook after the plugins have run."""
    from sglang.srt.entrypoints.engine import Engine
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register("sglang.srt.server_args.ServerArgs", ServerArgs, HookType.REPLACE)
    if Engine.server_args_class is _upstream():
        Engine.server_args_class = ServerArgs
