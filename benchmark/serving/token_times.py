"""Derives decode throughput from the arrival times of tokens."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence


def decoding(ttfts: Sequence[float], itls: Sequence[Sequence[float]]) -> tuple[float, float]:
    """Return (requests that decode concurrently, their tokens per second), medians over all tokens but the first ones.

    Args:
        ttfts: seconds to the first token of requests that were sent at the same time.
        itls: per request, seconds between its tokens.
    """
    arrivals = [
        list(itertools.accumulate(latencies, initial=first)) for first, latencies in zip(ttfts, itls, strict=True)
    ]
    counts, rates = [], []
    for times in arrivals:
        for before, now in itertools.pairwise(times):
            if now > before:  # several tokens may arrive together
                counts.append(sum(other[0] <= before and now <= other[-1] for other in arrivals))
                rates.append(counts[-1] / (now - before))
    return statistics.median(counts), statistics.median(rates)
