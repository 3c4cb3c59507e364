"""A plan as a figure: the use of device memory, and the effect of the fetch cap."""

from __future__ import annotations

from pathlib import Path

from sglang_oasis.errors import LookaheadKVError
from sglang_oasis.planner.plan import Plan


def save_plot(plan: Plan, file: Path) -> None:
    """Write the figure of a plan in the format of the file's suffix.

    Raises:
        LookaheadKVError: matplotlib is missing or does not know the format, or the file cannot be written.
    """
    if not file.suffix:
        raise LookaheadKVError(f"--plot {file} has no suffix: give one that names the format, e.g. {file}.png.")
    try:
        from matplotlib.axes import Axes
        from matplotlib.figure import Figure
    except ImportError:
        raise LookaheadKVError("--plot needs matplotlib: pip install 'sglang-oasis[planner]'.") from None

    def memory(axes: Axes) -> None:
        deployment, request, rows = plan.deployment, plan.request, plan.batch + 1
        dense = {
            "weights": deployment.weight_bytes,
            "dense K and V": plan.dense_batch * deployment.context * deployment.kv_token_bytes,
        }
        sparse = {
            "weights": deployment.weight_bytes,
            "resident blocks": rows * request.resident,
            "summaries": rows * request.row_summaries,
            "maps and averages": rows * (request.head_maps + request.averages),
            "prefill staging": deployment.staging_bytes,
        }
        names = list(dict.fromkeys([*dense, *sparse]))
        for place, parts in enumerate((dense, sparse)):
            bottom = 0.0
            for color, name in enumerate(names):
                size = parts.get(name, 0) / 1e9
                label = name if parts is sparse or name not in sparse else None
                axes.bar(place, size, bottom=bottom, color=f"C{color}", label=label if name in parts else None)
                bottom += size
        axes.axhline(deployment.static_bytes / 1e9, color="black", linestyle=":", label="weights and KV, at most")
        axes.set_xticks([0, 1], [f"dense\n{plan.dense_batch} requests", f"lookahead KV\n{plan.batch} requests"])
        axes.set_ylabel("GB on each GPU")
        axes.set_xlim(-0.5, 3.2)  # room for the legend
        axes.legend(fontsize="small", loc="upper right")

    def throughput(axes: Axes) -> None:
        ratios = [point.ratio for point in plan.sweep]
        axes.plot(ratios, [point.tokens_per_second for point in plan.sweep], "o-", label="lookahead KV, simulated")
        if plan.dense is not None:
            rate = plan.dense_batch / plan.dense.seconds
            axes.axhline(rate, color="C1", linestyle="--", label=f"dense, {plan.dense_batch} requests")
        axes.set_xscale("log")
        axes.set_ylim(bottom=0)
        axes.set_xlabel("fetch ratio")
        axes.set_ylabel("tokens/s, at most")
        axes.legend(fontsize="small")

    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    memory(left)
    throughput(right)
    where = f"{plan.deployment.tp} x {plan.deployment.gpu.name}"
    figure.suptitle(f"{plan.deployment.model.name}, {where}, {plan.deployment.context} tokens")
    try:
        figure.savefig(file, dpi=120)
    except (OSError, ValueError) as error:
        raise LookaheadKVError(f"--plot {file} cannot be written ({error}): give another file.") from None
