"""Pseudo-counts of responses, by which COPO's bonus is larger for what was seldom sampled.

COPO (arXiv 2501.12735) derives its bonus from the confidence width ‖φ‖ in the inverse of Σ φφᵀ + λI
over the responses collected so far, which is 1/√(N + λ) for features that tell N equal responses
from all others. Its code regresses random signs on hidden states, whose mean square estimates the
same form; here it is computed, on hashed n-grams of the response's tokens.

Shapes: `N` responses, `D` features.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from stages.training.batches import IntArray

NUM_FEATURES = 512
LONGEST_NGRAM = 3
RIDGE = 0.01
"""λ."""
_CHUNK = 4096
# Odd constants that spread the bits of a product: as in SplitMix64.
_MIX = np.uint64(0x9E3779B97F4A7C15)
_FINAL = np.uint64(0xBF58476D1CE4E5B9)


def novelty(responses: Sequence[IntArray]) -> NDArray[np.float64]:
    """The width √(φᵀ (Σ φφᵀ + λI)⁻¹ φ) of each response among all of them, [N]."""
    chunks = [responses[start : start + _CHUNK] for start in range(0, len(responses), _CHUNK)]
    covariance = RIDGE * np.eye(NUM_FEATURES)
    for chunk in chunks:
        rows = features(chunk)
        covariance += rows.T @ rows
    root = np.linalg.inv(np.linalg.cholesky(covariance))
    return np.concatenate([np.linalg.norm(features(chunk) @ root.T, axis=1) for chunk in chunks])


def features(responses: Sequence[IntArray]) -> NDArray[np.float64]:
    """Hashed counts of the n-grams of each response, with signs, at length one, [N, D]."""
    rows = np.zeros((len(responses), NUM_FEATURES))
    for row, tokens in zip(rows, responses, strict=True):
        hashed = np.zeros(len(tokens), np.uint64)
        for length in range(1, LONGEST_NGRAM + 1):
            if length > len(tokens):
                break
            # Each n-gram grows by one token, from where the shorter one began.
            last = tokens[length - 1 :].astype(np.uint64) + np.uint64(1)
            hashed = (hashed[: len(last)] + last) * _MIX
            mixed = (hashed ^ (hashed >> np.uint64(31))) * _FINAL
            signs = np.where(mixed >> np.uint64(63), 1.0, -1.0)
            np.add.at(row, (mixed >> np.uint64(32)) % np.uint64(NUM_FEATURES), signs)
    norms = np.linalg.norm(rows, axis=1, keepdims=True)
    return rows / np.where(norms > 0, norms, 1.0)
