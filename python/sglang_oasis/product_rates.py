"""How fast one core of this CPU multiplies matrices of each dtype in torch."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

ROWS, WIDTH = 32, 1024
"""A product is [ROWS, WIDTH] by [WIDTH, WIDTH]: some 70 million operations, like a layer's for a few requests."""
LEAST_SECONDS, LEAST_ROUNDS = 0.05, 4


def product_rates(dtypes: Sequence[torch.dtype]) -> list[float]:
    """Measure the operations per second of one core, one figure per dtype.

    The dtypes take turns, and the best of several products of each counts, because other programs on the machine can
    only make a product slower. Takes about 50 ms, and several times as long where a dtype is emulated.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # with several threads, one that waits for a core delays the others
    try:
        best = _best_seconds(dtypes)
    finally:
        torch.set_num_threads(threads)
    return [2 * ROWS * WIDTH * WIDTH / seconds for seconds in best]


@torch.inference_mode()
def _best_seconds(dtypes: Sequence[torch.dtype]) -> list[float]:
    factors = [(torch.ones(ROWS, WIDTH, dtype=dtype), torch.ones(WIDTH, WIDTH, dtype=dtype)) for dtype in dtypes]
    for vectors, matrix in factors:
        torch.nn.functional.linear(vectors, matrix)  # the first product of a dtype and shape also chooses a kernel
    best = [float("inf")] * len(factors)
    begun, rounds = time.perf_counter(), 0
    while rounds < LEAST_ROUNDS or time.perf_counter() - begun < LEAST_SECONDS:
        for i, (vectors, matrix) in enumerate(factors):
            start = time.perf_counter()
            torch.nn.functional.linear(vectors, matrix)
            best[i] = min(best[i], time.perf_counter() - start)
        rounds += 1
    return best
