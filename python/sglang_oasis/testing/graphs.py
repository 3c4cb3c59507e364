"""CUDA graphs, on machines with a GPU."""

from __future__ import annotations

from collections.abc import Callable

import torch


def captured(run: Callable[[], object], device: torch.device) -> Callable[[], object]:
    """Return a function that replays `run` as a CUDA graph, or `run` itself on a CPU; `run` must have run before."""
    if device.type != "cuda":
        return run
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay
