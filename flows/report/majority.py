"""Majority vote among some of a prompt's samples (maj@k). Pure."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import comb

import numpy as np


@lru_cache(maxsize=65536)
def majority_at_k(correct: int, wrong: Sequence[int], abstained: int, k: int) -> float:
    """Chance that the most frequent answer among k samples drawn of n is the correct one.

    Self-consistency (Wang et al. 2023, arXiv 2203.11171) averaged over all C(n, k) draws without
    replacement, so that it is unbiased for k < n as pass@k is. A tie is decided by chance: t wrong
    answers as frequent as the correct one leave it 1/(t+1). A draw without the correct answer
    fails. Samples without an answer are drawn and do not vote.

    Args:
        correct: Samples with the correct answer.
        wrong: Samples with each of the wrong answers.
        abstained: Samples without an answer.
        k: Samples drawn.

    Raises:
        ValueError: There are fewer than k samples.
    """
    samples = correct + sum(wrong) + abstained
    if not 1 <= k <= samples:
        raise ValueError(f"maj@{k} needs at least {k} samples of each prompt; one has {samples}")
    won = sum(
        comb(correct, votes) * _others(wrong, abstained, votes, k - votes)
        for votes in range(1, min(correct, k) + 1)
    )
    return won / comb(samples, k)


def _others(wrong: Sequence[int], abstained: int, votes: int, drawn: int) -> float:
    """Ways to draw the rest without more than ``votes`` of one answer, each by 1/(ties+1)."""
    # Ways by the number of answers that tie, and the number of samples drawn so far.
    most_ties = min(len(wrong), drawn // votes)
    ways = np.zeros((most_ties + 1, drawn + 1))
    ways[0] = [comb(abstained, each) for each in range(drawn + 1)]
    for size in wrong:
        following = np.zeros_like(ways)
        for taken in range(min(size, votes, drawn) + 1):
            added = comb(size, taken) * ways[:, : drawn + 1 - taken]
            if taken < votes:
                following[:, taken:] += added
            else:
                following[1:, taken:] += added[:-1]
        ways = following
    return float((ways[:, drawn] / np.arange(1, most_ties + 2)).sum())
