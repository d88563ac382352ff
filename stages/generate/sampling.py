"""Drawing tokens so that a response depends on its own seed only, not on its place in a batch.

Shapes: ``B`` sequences, ``V`` vocabulary.
"""

from __future__ import annotations

import numpy as np
import torch


def uniforms(seed: int, num_steps: int) -> np.ndarray:
    """The uniform numbers in [0, 1) that decide a response's tokens: one per step.

    Philox is counter-based: fewer steps give a prefix of the same numbers.
    """
    return np.random.Generator(np.random.Philox(key=seed)).random(num_steps)


def filtered_probabilities(
    logits: torch.Tensor, *, temperature: float, top_p: float
) -> torch.Tensor:
    """The distribution that tokens are drawn from.

    Args:
        logits: [B, V] of the policy.
        temperature: Divides the logits; positive.
        top_p: Keep the smallest set of likeliest tokens whose probability reaches this.

    Returns:
        [B, V] float64, rows sum to 1.
    """
    probabilities = torch.softmax(logits.double() / temperature, dim=-1)
    if top_p >= 1:
        return probabilities
    ordered, index = probabilities.sort(dim=-1, descending=True, stable=True)
    mass_before = ordered.cumsum(-1) - ordered
    kept = ordered.masked_fill(mass_before >= top_p, 0.0)
    return torch.zeros_like(probabilities).scatter(-1, index, kept / kept.sum(-1, keepdim=True))


def draw(
    logits: torch.Tensor, uniform: torch.Tensor, *, temperature: float, top_p: float
) -> torch.Tensor:
    """Draws one token per row by inverting its cumulative distribution.

    The cumulative sum runs in the order of the vocabulary, not of the probabilities: rounding that
    swaps two nearly equal tokens then moves a boundary by a rounding error and no token far.

    Args:
        logits: [B, V] of the policy.
        uniform: [B] numbers in [0, 1), float64.
        temperature: 0 takes the likeliest token.
        top_p: As in :func:`filtered_probabilities`.

    Returns:
        [B] token ids.
    """
    if temperature == 0:
        return logits.argmax(-1)
    cumulative = filtered_probabilities(logits, temperature=temperature, top_p=top_p).cumsum(-1)
    total = cumulative[:, -1:]
    # Rounding must not carry a uniform number next to 1 past the end of the vocabulary.
    target = torch.minimum(uniform[:, None] * total, total.nextafter(torch.zeros_like(total)))
    # right=True passes over tokens of probability 0 when the target is exactly on their boundary.
    return torch.searchsorted(cumulative, target, right=True)[:, 0]
