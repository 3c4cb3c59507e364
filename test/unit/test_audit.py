"""The audit's recall against plain loops over tokens."""

from __future__ import annotations

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_oasis.observability.audit import LayerRecall, Recall, measure_recall


@settings(max_examples=50, deadline=None)
@given(
    heads=st.integers(1, 3),
    group=st.integers(1, 3),
    blocks=st.integers(4, 9),
    last=st.integers(1, 8),
    seed=st.integers(0, 10_000),
)
def test_recall_is_what_loops_over_tokens_find(heads: int, group: int, blocks: int, last: int, seed: int) -> None:
    size, dim, selected, scale = 8, 16, 2, 0.3
    rng = torch.Generator().manual_seed(seed)
    query = torch.randn((heads * group, dim), generator=rng)
    keys = torch.randn((blocks, heads, size, dim), generator=rng)
    length, first_local = (blocks - 1) * size + last, blocks - 2
    keys[-1, :, last:] = float("nan")  # nobody may read these
    resident = torch.stack([torch.randperm(first_local, generator=rng)[:selected] for _ in range(heads)]).int()

    agreements, masses = [], []
    for head in range(heads):
        mass = [0.0] * blocks
        for vector in query[head * group : (head + 1) * group]:
            weights = [
                math.exp(scale * float(vector @ keys[token // size, head, token % size])) for token in range(length)
            ]
            for token, weight in enumerate(weights):
                mass[token // size] += weight / sum(weights) / group
        best = sorted(range(first_local), key=lambda block: -mass[block])[:selected]
        held = {*resident[head].tolist(), *range(first_local, blocks)}
        agreements.append(len(held & set(best)) / selected)
        masses.append(sum(mass[block] for block in held))

    found = measure_recall(query, keys, length, resident, first_local, scale)
    assert math.isclose(found.agreement, sum(agreements) / heads, abs_tol=1e-6)
    assert math.isclose(found.mass, sum(masses) / heads, abs_tol=1e-4)


def test_a_layers_mean_follows_and_its_worst_stays() -> None:
    layer = LayerRecall()
    for mass in (0.5, *[0.9] * 200):
        layer.add(Recall(1.0, mass))
    assert layer.mass is not None
    assert abs(layer.mass - 0.9) < 1e-3
    assert (layer.agreement, layer.worst_mass) == (1.0, 0.5)
