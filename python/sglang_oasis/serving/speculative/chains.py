"""Reduces NGRAM's trees of drafts to chains, which our backends can verify.

For any breadth, SGLang's corpus adds shorter matches beside the longest one, numbers all nodes breadth-first, and pads
the tree with token 0 below the root. Read from sglang 0.5.23: `kernels/jit/csrc/ngram_corpus/result.cpp`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

PADDING = 0


def longest_chains(tokens: NDArray[Any], mask: NDArray[Any], tokens_each: int) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return the longest path of each tree, from its root to a leaf, as a chain of `tokens_each` tokens.

    If the path is shorter, its last token is repeated, because lookahead uses the query of every draft, and that of a
    padding token would not fit the request.

    Args:
        tokens: [n * m], trees of m = `tokens_each` nodes, a parent before its children.
        mask: [n * m * m], nonzero where a node (row) equals or descends from another node (column).
        tokens_each: m.

    Returns:
        Tokens and mask in the same shapes and dtypes.
    """
    trees = tokens.reshape(-1, tokens_each)
    above = mask.reshape(-1, tokens_each, tokens_each) != 0
    chains = np.empty_like(trees)
    for chain, tree, ancestors in zip(chains, trees, above, strict=True):
        leaf = ancestors.sum(-1).argmax()  # the first of equally deep leaves, because padding comes last
        path = tree[ancestors[leaf]]
        if len(path) == 2 and path[1] == PADDING:
            path = path[:1]  # nothing matched
        chain[: len(path)] = path
        chain[len(path) :] = path[-1]
    linked = np.tril(np.ones((tokens_each, tokens_each), dtype=mask.dtype))
    return chains.reshape(tokens.shape), np.tile(linked.ravel(), len(trees)).reshape(mask.shape)
