"""Estimates with 95 % intervals over prompts: bootstrap, Wilson's interval, pass@k. Pure.

The unit of observation is the prompt: samples of one prompt resemble each other, so that a prompt's
samples enter a bootstrap together (Cameron, Gelbach & Miller 2008, the cluster bootstrap).

Shapes: ``P`` prompts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

CONFIDENCE = 0.95
"""Coverage of every interval that is shown."""
RESAMPLES = 4000
"""Resamples of a bootstrap: an end of a 95 % interval is the 100th smallest or largest."""
# Any fixed number: the same samples have the same intervals.
SEED = 20260101
# Resamples held in memory at once.
BATCH = 250

Floats = npt.NDArray[np.float64]
Bounds = tuple[float, float]
"""Least and largest value of a figure."""
UNBOUNDED = (-math.inf, math.inf)


@dataclass(frozen=True)
class Estimate:
    """A figure and the ends of its 95 % interval; None if there are too few observations.

    A difference has the two-sided p-value of there being none, unless it cannot be tested.
    """

    value: float
    low: float | None = None
    high: float | None = None
    p_value: float | None = None

    @property
    def interval(self) -> tuple[float, float] | None:
        """Both ends, or None."""
        return None if self.low is None or self.high is None else (self.low, self.high)

    def within(self, least: float, most: float) -> Estimate:
        """The same with an interval that ends at two bounds, unless the value is beyond them."""
        if self.low is None or self.high is None or not least <= self.value <= most:
            return self
        return replace(self, low=max(self.low, least), high=min(self.high, most))


def ratio_of_sums(numerators: Floats, denominators: Floats) -> Estimate:
    """Σ numerators / Σ denominators over prompts, with a percentile bootstrap over prompts.

    Args:
        numerators: A sum over each prompt's samples, [P].
        denominators: The number that it is divided by, such as the count of samples, [P].
    """
    prompts = len(numerators)
    value = float(numerators.sum() / denominators.sum())
    if prompts == 1:
        return Estimate(value)
    rng = np.random.default_rng(SEED)
    ratios = []
    for _ in range(RESAMPLES // BATCH):
        drawn = rng.integers(0, prompts, (BATCH, prompts))
        sums = numerators[drawn].sum(axis=1)
        counts = denominators[drawn].sum(axis=1)
        ratios.append(sums / counts)
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(np.concatenate(ratios), (tail, 1 - tail))
    return Estimate(value, float(low), float(high))


def pass_at_k(correct: int, samples: int, k: int) -> float:
    """Unbiased estimate of the chance that one of k of a prompt's samples is correct.

    ``1 − C(n−c, k) / C(n, k)`` for c correct samples of n, equation 1 of Chen et al. 2021 (arXiv
    2107.03374).

    Raises:
        ZeroDivisionError: The prompt has fewer than k samples.
    """
    return 1.0 - math.comb(samples - correct, k) / math.comb(samples, k)
