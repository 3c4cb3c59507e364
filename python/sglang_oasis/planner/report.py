"""A plan as tables for a terminal, and as JSON."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sglang_oasis.errors import LookaheadKVError
from sglang_oasis.planner.plan import Plan
from sglang_oasis.planner.roofline import Step

if TYPE_CHECKING:
    from rich.table import Table

UNITS = "bytes are of one GPU (rank) and its share of the host; steps are roofline lower bounds"


def record_of(plan: Plan) -> dict[str, Any]:
    """Return a plan as JSON values; sizes in bytes, times in seconds."""
    deployment = plan.deployment
    layout, gpu, capacity = deployment.layout, deployment.gpu, plan.capacity
    return {
        "units": UNITS,
        "model": {
            "name": deployment.model.name,
            "parameters": deployment.model.parameters,
            "active_parameters": deployment.model.active_parameters,
            "kv_bytes_per_token": deployment.model.kv_token_bytes,
        },
        "gpu": dict(vars(gpu)),
        "context": deployment.context,
        "tp": deployment.tp,
        "memory_fraction": deployment.memory_fraction,
        "bytes": {
            "weights": deployment.weight_bytes,
            "kv_budget": deployment.kv_bytes,
            "kv_per_token": deployment.kv_token_bytes,
            "request": plan.request._asdict(),
            "staging": deployment.staging_bytes,
            "device_tier": plan.device_tier_bytes,
            "device_tier_and_staging": plan.device_flag_bytes,
            "host_tier": plan.host_tier_bytes,
            "host_tier_of_all_ranks": plan.host_tier_bytes * deployment.tp,
        },
        "blocks": {
            "size": layout.block_size,
            "selected": min(layout.selected_blocks),
            "local": layout.local_slots,
            "of_a_row": layout.max_blocks,
            "fetchable": deployment.fetchable_blocks,
        },
        "capacity": {**capacity._asdict(), "bound": capacity.bound},
        "dense_step": None if plan.dense is None else _step(plan.dense, plan.dense_batch),
        "sparse_step": _step(plan.sparse, plan.batch),
        "speedup": plan.speedup,
        "step_bytes_budget": {"bytes": plan.step_bytes, "tokens_per_request": plan.tokens_of_step_bytes},
        "pipeline": {**plan.pipeline._asdict(), "holds": plan.pipeline.holds},
        "fetch_cap_blocks": plan.cap,
        "fetched_blocks": plan.fetched_blocks,
        "fetch_cap_sweep": [point._asdict() for point in plan.sweep],
        "remarks": plan.remarks,
        "command": plan.command,
    }


def print_plan(plan: Plan) -> None:
    """Print the tables, the remarks as comments, and the command to standard output.

    Raises:
        LookaheadKVError: rich is missing.
    """
    try:
        import rich
    except ImportError:
        raise LookaheadKVError("The tables need rich: pip install 'sglang-oasis[planner]'.") from None

    deployment = plan.deployment
    title = f"{deployment.model.name} on {deployment.tp} x {deployment.gpu.name}, {deployment.context} tokens a request"
    rich.print(_summary(plan, title), _tiers(plan), _sweep(plan))
    for remark in plan.remarks:
        print(f"# {remark}")
    print(plan.command)


def _step(step: Step, batch: int) -> dict[str, Any]:
    return {"batch": batch, **step._asdict(), "tokens_per_second": batch / step.seconds}


def _table(title: str, *columns: str) -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD)
    table.add_column(columns[0])
    for column in columns[1:]:
        table.add_column(column, justify="right")
    return table


def _summary(plan: Plan, title: str) -> Table:
    capacity, dense, sparse = plan.capacity, plan.dense, plan.sparse
    table = _table(title, "", "dense", "lookahead KV")
    hosted = "" if capacity.host_requests is None else f", host: {capacity.host_requests}"
    table.add_row("requests that fit", str(capacity.dense), f"{capacity.lookahead} ({capacity.bound})")
    table.add_row("  by memory", "", f"device: {capacity.device_rows}{hosted}")
    table.add_row("requests in the step", str(plan.dense_batch), str(plan.batch))
    table.add_row("decode step, at least", _ms(dense and dense.seconds), _ms(sparse.seconds))
    for part in ("weights", "attention", "predict", "select", "fetch_seconds"):
        name = "fetch, on the link" if part == "fetch_seconds" else part
        table.add_row(f"  {name}", _ms(dense and getattr(dense, part)), _ms(getattr(sparse, part)))
    table.add_row("bound by", dense.bound if dense else "-", sparse.bound)
    dense_rate = "-" if dense is None else f"{plan.dense_batch / dense.seconds:.0f} tokens/s"
    gain = "" if plan.speedup is None else f" ({plan.speedup:.1f}x)"
    table.add_row("throughput, at most", dense_rate, f"{plan.batch / sparse.seconds:.0f} tokens/s{gain}")
    host, ranks = plan.host_tier_bytes, plan.deployment.tp
    by_rank = "" if ranks == 1 else f"{ranks} x {host / 1e9:.2f} = "
    table.add_row("host memory, all ranks", "", f"{by_rank}{_gb(ranks * host)}")
    table.add_row(f"fetched, {plan.fetched_blocks:g} blocks a head at most", "", _gb(sparse.fetch_bytes))
    hidden = f"{_gb(plan.step_bytes)}, {plan.tokens_of_step_bytes:.0f} tokens/request"
    table.add_row("the link hides (Eq. 3)", "", hidden)
    pipeline = plan.pipeline
    slowest = max(pipeline.predict, pipeline.select, pipeline.transfer)
    verdict = "holds" if pipeline.holds else "does not hold"
    table.add_row("slowest stage (Eq. 4)", "", f"{_us(slowest)} of {_us(pipeline.interval)} a layer: {verdict}")
    return table


def _tiers(plan: Plan) -> Table:
    deployment, request, batch = plan.deployment, plan.request, plan.batch
    table = _table("Bytes on one GPU and its share of the host", "", "one request", "all")
    table.add_row("K and V, dense", _mb(deployment.context * deployment.kv_token_bytes), "")
    table.add_section()
    table.add_row("weights", "", _gb(deployment.weight_bytes))
    for name in ("resident", "head_maps", "averages", "row_summaries"):
        size = getattr(request, name)
        table.add_row(name.replace("_", " "), _mb(size), _gb(size * (batch + 1)))
    table.add_row("prefill staging", "", _gb(deployment.staging_bytes))
    left = deployment.kv_bytes - deployment.staging_bytes - plan.device_tier_bytes
    table.add_row("left of what SGLang takes", "", _gb(left))
    table.add_section()
    table.add_row("host K and V", _mb(request.host_kv), _gb(request.host_kv * batch))
    table.add_row("host summaries", _mb(request.host_summaries), _gb(request.host_summaries * batch))
    return table


def _sweep(plan: Plan) -> Table:
    columns = ("fetch ratio", "blocks", "GB/step", "link GB/s", "step", "of it waiting", "tokens/s")
    table = _table(f"The simulated pipeline, {plan.batch} requests", *columns)
    for point in plan.sweep:
        table.add_row(
            f"{point.ratio:g}", str(point.cap), f"{point.fetch_bytes / 1e9:.2f}",
            f"{point.link_bytes_per_second / 1e9:.1f}", _ms(point.step_seconds), _ms(point.stall_seconds),
            f"{point.tokens_per_second:.0f}",
        )  # fmt: skip
    return table


def _gb(size: float) -> str:
    return f"{size / 1e9:.2f} GB"


def _mb(size: float) -> str:
    return f"{size / 1e6:.1f} MB"


def _us(seconds: float) -> str:
    return f"{seconds * 1e6:.0f} us"


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:.1f} ms"
