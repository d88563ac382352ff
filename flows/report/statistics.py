"""Intervals and tests of the report: bootstrap, permutation, Student, Welch, Wilson, Holm. Pure.

The unit of observation is the prompt: samples of one prompt resemble each other, so that a prompt's
samples enter a bootstrap together (Cameron, Gelbach & Miller 2008, the cluster bootstrap). Over
seeds the unit is the run.

Shapes: ``P`` prompts, ``S`` seeds, ``M`` comparisons.
"""

import math
import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy import stats

from flows.report.table import Estimate

CONFIDENCE = 0.95
"""Coverage of every interval that is shown."""
RESAMPLES = 4000
"""Resamples of a bootstrap: an end of a 95 % interval is the 100th smallest or largest."""
PERMUTATIONS = 9999
"""Most sign patterns of a permutation test; the smallest p-value is then 10⁻⁴."""

# Any fixed number: the same artifacts have the same intervals in every report.
_SEED = 20260101
# Resamples held in memory at once.
_BATCH = 250

Floats = npt.NDArray[np.float64]


def ratio_of_sums(numerators: Floats, denominators: Floats) -> Estimate:
    """Σ numerators / Σ denominators over prompts, with a percentile bootstrap over prompts.

    Args:
        numerators: A sum over each prompt's samples, [P].
        denominators: The number that it is divided by, such as the count of samples, [P].

    Raises:
        ValueError: There are no prompts.
    """
    value = _ratio(numerators, denominators)
    if len(numerators) < 2:
        return Estimate(float(value))
    found = stats.bootstrap(
        (numerators, denominators),
        _ratio,
        paired=True,
        vectorized=True,
        n_resamples=RESAMPLES,
        batch=_BATCH,
        confidence_level=CONFIDENCE,
        method="percentile",
        rng=np.random.default_rng(_SEED),
    ).confidence_interval
    return Estimate(float(value), float(found.low), float(found.high))


def _ratio(numerators: Floats, denominators: Floats, axis: int = -1) -> Floats:
    if numerators.shape[axis] == 0:
        raise ValueError("there are no prompts to average over")
    ratio: Floats = numerators.sum(axis=axis) / denominators.sum(axis=axis)
    return ratio


def proportion(successes: int, trials: int) -> Estimate:
    """A share of independent trials with Wilson's interval (Wilson 1927); ValueError without any.

    A bootstrap of a share of 0 or 1 has no width, however few the trials; this interval has.
    """
    found = stats.binomtest(successes, trials).proportion_ci(CONFIDENCE, method="wilson")
    return Estimate(successes / trials, float(found.low), float(found.high))


def over_seeds(values: Sequence[float], whole: float | None = None) -> Estimate:
    """Mean of runs with different seeds, with Student's t interval.

    Args:
        values: The figure in each run.
        whole: The largest share in its unit, 1 or 100, at which and at 0 the interval ends; None
            if the figure has no upper bound.

    Raises:
        ValueError: There are no values.
    """
    if not values:
        raise ValueError("there are no seeds to average over")
    mean = math.fsum(values) / len(values)
    if len(values) < 2:
        return Estimate(mean)
    half = float(stats.t.ppf((1 + CONFIDENCE) / 2, len(values) - 1) * stats.sem(values))
    return Estimate(mean, mean - half, mean + half).within(0.0, whole)


def welch(first: Sequence[float], second: Sequence[float], whole: float | None = None) -> Estimate:
    """Mean of ``second`` minus mean of ``first``, over seeds whose variances may differ.

    Interval and p-value are by Welch's t test (Welch 1947). Runs whose values do not vary, except
    by rounding, have neither. ``whole`` is as in :func:`over_seeds`. ValueError if one of them
    is empty.
    """
    difference = over_seeds(second).value - over_seeds(first).value
    if min(len(first), len(second)) < 2 or (_constant(first) and _constant(second)):
        return Estimate(difference)
    with warnings.catch_warnings():
        # One method's runs may all have the same value; the variance is then the other's alone.
        warnings.filterwarnings("ignore", "Precision loss occurred", RuntimeWarning)
        found = stats.ttest_ind(second, first, equal_var=False)
    return _tested(difference, found, whole)


def difference_of_methods(
    first: Sequence[tuple[int, float]], second: Sequence[tuple[int, float]], whole: float | None
) -> tuple[Estimate, str]:
    """Mean of ``second`` minus mean of ``first``, of seeds and values, and the name of its test.

    Runs of one seed share prompts and samples. So methods with the same seeds are ``paired``:
    tested by Student's t test of the differences, unless these do not vary. Others are tested by
    :func:`welch`. ``whole`` is as in :func:`over_seeds`.
    """
    old = dict(first)
    new = dict(second)
    if old.keys() != new.keys() or not len(old) == len(first) == len(second):
        return welch([value for _, value in first], [value for _, value in second], whole), "Welch"
    differences = np.array([new[seed] - old[seed] for seed in old])
    mean = float(differences.mean())
    if _constant(differences):
        return Estimate(mean), "paired"
    return _tested(mean, stats.ttest_1samp(differences, 0.0), whole), "paired"


def _constant(values: Floats | Sequence[float]) -> bool:
    """True if values are equal except for rounding."""
    return np.allclose(values, values[0], rtol=1e-9, atol=1e-12)


def _tested(difference: float, test: Any, whole: float | None) -> Estimate:
    ends = test.confidence_interval(CONFIDENCE)
    estimate = Estimate(difference, float(ends.low), float(ends.high), float(test.pvalue))
    return estimate.within(-(whole or 0.0), whole)


def paired_difference(first: Floats, second: Floats) -> Estimate:
    """Mean of ``second − first`` over the prompts that two runs have in common.

    The interval is a bootstrap over prompts, the p-value that of a permutation test that swaps the
    two runs' values within prompts: exact if 2^P is at most :data:`PERMUTATIONS`.

    Args:
        first: A figure of each prompt in the first run, [P].
        second: The same prompts' in the second run, [P].

    Raises:
        ValueError: There are no prompts, or other prompts in each run.
    """
    if first.shape != second.shape:
        raise ValueError(f"the runs have {len(first)} and {len(second)} prompts, and must share")
    differences = second - first
    estimate = ratio_of_sums(differences, np.ones_like(differences))
    if len(differences) < 2:
        return estimate
    found = stats.permutation_test(
        (differences,),
        np.mean,
        permutation_type="samples",
        vectorized=True,
        n_resamples=PERMUTATIONS,
        batch=_BATCH,
        rng=np.random.default_rng(_SEED),
    )
    return replace(estimate, p_value=float(found.pvalue))


def holm(p_values: Sequence[float | None]) -> list[float | None]:
    """Adjusted p-values of M tests that keep the family-wise error rate (Holm 1979).

    Args:
        p_values: p-values, [M], in any order; None for a test that could not be made, which does
            not count.

    Returns:
        Adjusted p-values in the same order, None if there was none.
    """
    adjusted: list[float | None] = [None] * len(p_values)
    known = sorted((each, place) for place, each in enumerate(p_values) if each is not None)
    largest = 0.0
    for rank, (p_value, place) in enumerate(known):
        largest = max(largest, min(1.0, (len(known) - rank) * p_value))
        adjusted[place] = largest
    return adjusted


def pass_at_k(correct: npt.NDArray[np.int64], samples: npt.NDArray[np.int64], k: int) -> Floats:
    """Unbiased estimate of the chance that one of k samples is correct, prompt by prompt.

    ``1 − C(n−c, k) / C(n, k)``, equation 1 of Chen et al. 2021 (arXiv 2107.03374), as the product
    of their figure 3, which does not overflow.

    Args:
        correct: Correct samples c of each prompt, [P].
        samples: Samples n of each prompt, [P].
        k: Samples that may be tried.

    Returns:
        Estimates, [P].

    Raises:
        ValueError: A prompt has fewer than k samples.
    """
    if k < 1 or (len(samples) and samples.min() < k):
        fewest = int(samples.min()) if len(samples) else 0
        raise ValueError(f"pass@{k} needs at least {k} samples of each prompt; one has {fewest}")
    wrong = (samples - correct)[:, None]
    # The i-th of k draws without replacement is wrong with probability (n−c−i) / (n−i).
    drawn = np.arange(k)[None, :]
    missed = np.clip(wrong - drawn, 0, None) / (samples[:, None] - drawn)
    return np.asarray(1.0 - missed.prod(axis=1), dtype=np.float64)
