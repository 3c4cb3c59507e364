"""CUDA graphs where there is a GPU."""

from __future__ import annotations

from collections.abc import Callable

import torch


def captured(run: Callable[[], object], device: torch.device) -> Callable[[], object]:
    """`run` as a CUDA graph, to be replayed; `run` itself on a CPU. It must have run before."""
    if device.type != "cuda":
        return run
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay
