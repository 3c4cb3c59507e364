"""Every knob of lookahead KV: its flag, default and validation. The command-line flags are derived from this file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, NoReturn

from sglang_oasis.errors import LookaheadKVError

SUPPORTED_BLOCK_SIZES = (8, 16, 32)
DEFAULT_BLOCK_SIZE = 16
AUTO, NONE = "auto", "none"


@dataclass(frozen=True)
class Knob:
    """One flag: `--{name with dashes}`, the same name as an `sgl.Engine` keyword and as a `--config` key.

    Attributes:
        name: field name in SGLang's ServerArgs.
        default: value when the flag is absent.
        parse: turns the command-line string into the value kept in ServerArgs.
        help: one line for `--help`.
        choices: accepted values, None when any value is parsed.
    """

    name: str
    default: Any
    parse: Callable[[str], Any]
    help: str
    choices: tuple[str, ...] | None = None

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")


def _number_or_auto(text: str) -> float | str:
    return AUTO if text == AUTO else float(text)


DENSE_BACKEND_NAME = "oasis_cpu"
"""Value of SGLang's --attention-backend for dense attention on the same pool and kernels, without lookahead."""

BACKEND_NAME = "lookahead_kv"
"""Name of the attention backend behind --enable-lookahead-kv."""

ENABLE_FLAG = "enable_lookahead_kv"

DRAFT, DUAL, LAST_QUERY = "draft", "dual", "last-query"
"""Sources of the lookahead query."""

DROP, FETCH = "drop", "fetch"
"""Miss policies, besides AUTO."""

DEFAULT_FETCH_RATIO = 0.05
AUTO_AUDIT_INTERVAL = 8
"""Steps between two audits when the miss policy depends on audits and no interval was given."""

DUAL_ALGORITHM = "LOOKAHEAD_DUAL"
"""SGLang's --speculative-algorithm behind source `dual`: no draft model, the model guesses two tokens ahead."""

KNOBS: tuple[Knob, ...] = (
    Knob(
        "lookahead_kv_budget_tokens",
        2048,
        int,
        "Selected tokens per KV head and layer that stay on the device; a multiple of the page size.",
    ),
    Knob("lookahead_kv_recent_tokens", 16, int, "Newest completed tokens that always stay on the device."),
    Knob("lookahead_kv_sink_tokens", 16, int, "First tokens that always stay on the device, inside the budget."),
    Knob(
        "lookahead_kv_fetch_ratio",
        DEFAULT_FETCH_RATIO,
        _number_or_auto,
        "Blocks fetched ahead per KV head, layer and step, at most, as a fraction of the budget; auto = what the link "
        "can move in a step, as far as the working set needs it.",
    ),
    Knob(
        "lookahead_kv_smoothing",
        0.9,
        float,
        "Weight of the past in the running average of a block's scores, in [0, 1): near-ties move no blocks; 0 = off.",
    ),
    Knob(
        "lookahead_kv_source",
        AUTO,
        str,
        "Query that predicts the next step's blocks: of the drafts of --speculative-algorithm, of a token that the "
        "model itself guesses (dual), or the last query. auto = draft where there is one, else last-query.",
    ),
    Knob(
        "lookahead_kv_reject_drafts",
        False,
        bool,
        "Look ahead with the drafts of --speculative-algorithm but accept none, to measure what lookahead alone gives.",
    ),
    Knob(
        "lookahead_kv_miss_policy",
        DROP,
        str,
        "drop: attend to what is resident; fetch: load what the true query selects before attending; auto: fetch in "
        "layers whose audited recall is low.",
        (DROP, FETCH, AUTO),
    ),
    Knob("lookahead_kv_selector", "midrange", str, "How blocks are scored from their summaries."),
    Knob(
        "lookahead_kv_summary_dtype",
        "int4",
        str,
        "How the two vectors that summarise a block's keys are stored.",
        ("bf16", "int8", "int4"),
    ),
    Knob(
        "lookahead_kv_calibration",
        NONE,
        str,
        "Statistics of the model's keys, to which summaries are relative: a file that python -m sglang_oasis.calibrate "
        "wrote, auto = the model's file in the cache, if there is one, or none.",
    ),
    Knob(
        "lookahead_kv_host_gb",
        AUTO,
        _number_or_auto,
        "Host memory per rank for the full KV cache in GB (10^9 bytes); auto = half of what is free.",
    ),
    Knob(
        "lookahead_kv_device_gb",
        AUTO,
        _number_or_auto,
        "Device memory per rank for resident blocks and summaries in GB (10^9 bytes); it sets max_running_requests. "
        "auto = SGLang's own KV budget on a GPU, a quarter of the free memory on a CPU.",
    ),
    Knob("lookahead_kv_dense_layers", "", str, "Layers that keep every block on the device, e.g. '0,1'."),
    Knob(
        "lookahead_kv_audit_interval",
        0,
        int,
        "Measure the true recall of a sampled request every N decode steps, from the full keys; 0 = off, but every "
        f"{AUTO_AUDIT_INTERVAL} with miss policy auto.",
    ),
)


class Speculation(NamedTuple):
    """How SGLang speculates.

    Attributes:
        algorithm: --speculative-algorithm, None without speculation.
        draft_tokens: drafts verified per step.
    """

    algorithm: str | None = None
    draft_tokens: int = 0


@dataclass(frozen=True)
class LookaheadKVConfig:
    """Validated configuration; the only form in which the rest of the package sees the flags.

    Attributes:
        budget_tokens: selected tokens per KV head and layer (K*B).
        recent_tokens: always-resident tail besides the open block, in tokens.
        sink_tokens: always-resident head inside the budget, in tokens.
        fetch_ratio: fetch cap as a fraction of K, in (0, 1]; None for a cap that adapts.
        smoothing: weight of the past in the average of a block's scores, in [0, 1); 0 for none.
        source: name of a registered source of the lookahead query, DRAFT, DUAL or LAST_QUERY among them.
        reject_drafts: drafts serve as lookahead queries and are never accepted.
        miss_policy: DROP, FETCH or AUTO.
        selector: name of a registered selector.
        summary_dtype: "bf16", "int8" or "int4".
        calibration: file of the model's calibration, AUTO for the one in the cache, NONE for none.
        host_gb: L2 bytes per rank / 10^9, None = automatic.
        device_gb: L1 bytes per rank / 10^9, None = automatic.
        dense_layers: layer ids that keep every block on the device.
        audit_interval: decode steps between two measurements of recall, 0 for none.
        block_size: tokens per block (SGLang's page size).
        draft_tokens: most tokens beyond the committed ones that a step may write.
    """

    budget_tokens: int
    recent_tokens: int
    sink_tokens: int
    fetch_ratio: float | None
    smoothing: float
    source: str
    reject_drafts: bool
    miss_policy: str
    selector: str
    summary_dtype: str
    calibration: str
    host_gb: float | None
    device_gb: float | None
    dense_layers: tuple[int, ...]
    audit_interval: int
    block_size: int
    draft_tokens: int

    @property
    def selected_blocks(self) -> int:
        """K: selected blocks per KV head and layer."""
        return self.budget_tokens // self.block_size

    @property
    def recent_blocks(self) -> int:
        return -(-self.recent_tokens // self.block_size)

    @property
    def sink_blocks(self) -> int:
        return -(-self.sink_tokens // self.block_size)

    @classmethod
    def from_flags(
        cls,
        flags: Mapping[str, Any],
        block_size: int = DEFAULT_BLOCK_SIZE,
        speculation: Speculation = Speculation(),  # noqa: B008
    ) -> LookaheadKVConfig:
        """Validate raw flag values.

        Args:
            flags: knob name -> value, as SGLang's ServerArgs holds them; absent names take their default.
            block_size: SGLang's page size in tokens.
            speculation: how SGLang speculates.

        Raises:
            LookaheadKVError: one sentence naming the flag, its value and the remedy.
        """
        value = {knob.name: flags.get(knob.name, knob.default) for knob in KNOBS}
        for knob in KNOBS:
            if knob.choices is not None and value[knob.name] not in knob.choices:
                _refuse(knob.name, value[knob.name], f"one of {', '.join(knob.choices)}")
        config = cls(
            budget_tokens=_positive_int(value, "lookahead_kv_budget_tokens"),
            recent_tokens=_count(value, "lookahead_kv_recent_tokens"),
            sink_tokens=_count(value, "lookahead_kv_sink_tokens"),
            fetch_ratio=_ratio_or_auto(value, "lookahead_kv_fetch_ratio"),
            smoothing=_decay(value, "lookahead_kv_smoothing"),
            source=_source(value["lookahead_kv_source"], speculation),
            reject_drafts=_reject_drafts(value, "lookahead_kv_reject_drafts", speculation),
            miss_policy=value["lookahead_kv_miss_policy"],
            selector=value["lookahead_kv_selector"],
            summary_dtype=value["lookahead_kv_summary_dtype"],
            calibration=_file(value, "lookahead_kv_calibration"),
            host_gb=_gigabytes(value, "lookahead_kv_host_gb"),
            device_gb=_gigabytes(value, "lookahead_kv_device_gb"),
            dense_layers=_layer_ids(value, "lookahead_kv_dense_layers"),
            audit_interval=_audit_interval(value),
            block_size=block_size,
            draft_tokens=speculation.draft_tokens,
        )
        _check_blocks(config)
        return config

    def of_draft_model(self) -> LookaheadKVConfig:
        """The configuration for a draft model's tiers, which affect how many drafts are accepted, not the answers."""
        ratio = DEFAULT_FETCH_RATIO if self.fetch_ratio is None else self.fetch_ratio
        return replace(
            self,
            miss_policy=DROP,
            source=LAST_QUERY,
            dense_layers=(),
            audit_interval=0,
            fetch_ratio=ratio,
            calibration=NONE,
        )

    def check_layers(self, num_layers: int) -> None:
        """Raise LookaheadKVError when a dense layer does not exist in a model of `num_layers` layers."""
        absent = [layer for layer in self.dense_layers if layer >= num_layers]
        if absent:
            _refuse("lookahead_kv_dense_layers", absent[0], f"layers of the model, 0 to {num_layers - 1}")


def _refuse(name: str, value: Any, wanted: str) -> NoReturn:
    flag = "--" + name.replace("_", "-")
    raise LookaheadKVError(f"{flag} must be {wanted}, got {value}.")


def _switch(value: Mapping[str, Any], name: str) -> bool:
    if not isinstance(value[name], bool):
        _refuse(name, value[name], "true or false")
    return value[name]


def _reject_drafts(value: Mapping[str, Any], name: str, speculation: Speculation) -> bool:
    asked = _switch(value, name)
    if asked and speculation.algorithm in (None, DUAL_ALGORITHM):
        raise LookaheadKVError(
            "--lookahead-kv-reject-drafts has no effect without drafts: add --speculative-algorithm EAGLE3 or NGRAM, "
            "or remove --lookahead-kv-reject-drafts."
        )
    return asked


def _source(asked: str, speculation: Speculation) -> str:
    available = {None: LAST_QUERY, DUAL_ALGORITHM: DUAL}.get(speculation.algorithm, DRAFT)
    if asked == DRAFT and available != DRAFT:
        raise LookaheadKVError("--lookahead-kv-source draft needs drafts: add --speculative-algorithm EAGLE3 or NGRAM.")
    if asked == DUAL and available == DRAFT:
        raise LookaheadKVError(
            f"--lookahead-kv-source dual does not work with --speculative-algorithm {speculation.algorithm}: remove "
            f"one of the two."
        )
    return available if asked == AUTO else asked


def _file(value: Mapping[str, Any], name: str) -> str:
    if not isinstance(value[name], str) or not value[name]:
        _refuse(name, value[name], "a file, 'auto' or 'none'")
    return value[name]


def _int(value: Mapping[str, Any], name: str, least: int, wanted: str) -> int:
    number = value[name]
    if isinstance(number, bool) or not isinstance(number, int) or number < least:
        _refuse(name, number, wanted)
    return number


def _positive_int(value: Mapping[str, Any], name: str) -> int:
    return _int(value, name, 1, "a whole number of tokens, at least one page")


def _count(value: Mapping[str, Any], name: str) -> int:
    return _int(value, name, 0, "a whole number of tokens, 0 or more")


def _float(value: Mapping[str, Any], name: str, wanted: str) -> float:
    if isinstance(value[name], bool):
        _refuse(name, value[name], wanted)
    try:
        return float(value[name])
    except (TypeError, ValueError, OverflowError):
        _refuse(name, value[name], wanted)


def _ratio_or_auto(value: Mapping[str, Any], name: str) -> float | None:
    if value[name] == AUTO:
        return None
    wanted = "in (0, 1] or 'auto'"
    ratio = _float(value, name, wanted)
    if not 0 < ratio <= 1:
        _refuse(name, value[name], wanted)
    return ratio


def _decay(value: Mapping[str, Any], name: str) -> float:
    wanted = "in [0, 1), where 0 is off"
    decay = _float(value, name, wanted)
    if not 0 <= decay < 1:
        _refuse(name, value[name], wanted)
    return decay


def _audit_interval(value: Mapping[str, Any]) -> int:
    interval = _int(value, "lookahead_kv_audit_interval", 0, "a whole number of steps, 0 or more, where 0 is off")
    depends = value["lookahead_kv_miss_policy"] == AUTO
    return AUTO_AUDIT_INTERVAL if depends and not interval else interval


def _gigabytes(value: Mapping[str, Any], name: str) -> float | None:
    if value[name] in (AUTO, None):
        return None
    wanted = "a number of gigabytes above 0, or 'auto'"
    gigabytes = _float(value, name, wanted)
    if not 0 < gigabytes < float("inf"):
        _refuse(name, value[name], wanted)
    return gigabytes


def _layer_ids(value: Mapping[str, Any], name: str) -> tuple[int, ...]:
    given = value[name]
    parts = [str(layer) for layer in given] if isinstance(given, (list, tuple)) else str(given).split(",")
    parts = [part.strip() for part in parts if part.strip()]
    if not all(part.isascii() and part.isdecimal() for part in parts):
        _refuse(name, given, "layer numbers separated by commas, as in 0,1")
    return tuple(sorted({int(part) for part in parts}))


def check_block_size(block_size: int) -> None:
    """Raise LookaheadKVError when the host pool cannot have pages of `block_size` tokens."""
    if block_size not in SUPPORTED_BLOCK_SIZES:
        sizes = ", ".join(map(str, SUPPORTED_BLOCK_SIZES))
        raise LookaheadKVError(f"--page-size must be one of {sizes} with sglang-oasis, got {block_size}.")


def _check_blocks(config: LookaheadKVConfig) -> None:
    check_block_size(config.block_size)
    if config.budget_tokens % config.block_size:
        _refuse("lookahead_kv_budget_tokens", config.budget_tokens, f"a multiple of the page size {config.block_size}")
    if config.sink_blocks >= config.selected_blocks:
        _refuse(
            "lookahead_kv_sink_tokens",
            config.sink_tokens,
            f"at least one page less than the budget of {config.budget_tokens} tokens",
        )
    if config.draft_tokens >= config.block_size:
        raise LookaheadKVError(
            f"--speculative-num-draft-tokens must be at most a page of {config.block_size} tokens with "
            f"--enable-lookahead-kv, got {config.draft_tokens + 1}."
        )
    if config.draft_tokens and not config.recent_blocks:
        _refuse(
            "lookahead_kv_recent_tokens",
            config.recent_tokens,
            "1 or more with speculation",
        )
