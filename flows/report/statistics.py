"""Tests of the report: permutation over prompts; Student, Welch and Holm over seeds. Pure.

Shapes: ``P`` prompts, ``S`` seeds, ``M`` comparisons.
"""

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from scipy import stats

from stages.evaluate.statistics import (
    BATCH,
    CONFIDENCE,
    SEED,
    UNBOUNDED,
    Bounds,
    Estimate,
    Floats,
    ratio_of_sums,
)

PERMUTATIONS = 9999
"""Most sign patterns of a permutation test; the smallest p-value is then 2 · 10⁻⁴."""


def over_seeds(values: Sequence[float], bounds: Bounds = UNBOUNDED) -> Estimate:
    """Mean of runs with different seeds, with Student's t interval if they vary.

    Args:
        values: The figure in each run.
        bounds: The interval ends at them.
    """
    mean = math.fsum(values) / len(values)
    if len(values) < 2 or _constant(values):
        return Estimate(mean)
    quantile = stats.t.ppf((1 + CONFIDENCE) / 2, len(values) - 1)
    half = float(quantile * stats.sem(values))
    return Estimate(mean, mean - half, mean + half).within(*bounds)


def welch(first: Sequence[float], second: Sequence[float], bounds: Bounds = UNBOUNDED) -> Estimate:
    """Mean of ``second`` minus mean of ``first``, over seeds whose variances may differ.

    Interval and p-value are by Welch's t test (Welch 1947). Runs whose values do not vary, except
    by rounding, have neither. ``bounds`` are as in :func:`over_seeds`.
    """
    difference = over_seeds(second).value - over_seeds(first).value
    if min(len(first), len(second)) < 2 or (_constant(first) and _constant(second)):
        return Estimate(difference)
    with warnings.catch_warnings():
        # One method's runs may all have the same value; the variance is then the other's alone.
        warnings.filterwarnings("ignore", "Precision loss occurred", RuntimeWarning)
        test = stats.ttest_ind(second, first, equal_var=False)
    return _tested(difference, test, bounds)


Seeds = Mapping[int, float]
"""Values of a method's runs by their seeds."""


def difference_of_methods(first: Seeds, second: Seeds, bounds: Bounds) -> tuple[Estimate, str]:
    """Mean of ``second`` minus mean of ``first``, and the name of its test.

    Runs of one seed share prompts and samples. So methods with the same seeds are ``paired``:
    tested by Student's t test of the differences, unless these do not vary. Others are tested by
    :func:`welch`. ``bounds`` are as in :func:`over_seeds`.
    """
    before = [first[seed] for seed in sorted(first)]
    now = [second[seed] for seed in sorted(second)]
    if first.keys() != second.keys():
        return welch(before, now, bounds), "Welch"
    differences = np.subtract(now, before)
    mean = float(differences.mean())
    if _constant(differences):
        return Estimate(mean), "paired"
    return _tested(mean, stats.ttest_1samp(differences, 0.0), bounds), "paired"


def _constant(values: Floats | Sequence[float]) -> bool:
    """True if values are equal except for rounding."""
    return np.allclose(values, values[0], rtol=1e-9, atol=1e-12)


def _tested(difference: float, test: Any, bounds: Bounds) -> Estimate:
    low, high = test.confidence_interval(CONFIDENCE)
    estimate = Estimate(difference, float(low), float(high), float(test.pvalue))
    least, largest = bounds
    return estimate.within(least - largest, largest - least)


def paired_difference(first: Floats, second: Floats) -> Estimate:
    """Mean of ``second − first`` over the prompts that two runs have in common.

    The interval is a bootstrap over prompts, the p-value is a permutation test's that swaps the
    two runs' values within prompts: exact if 2^P is at most :data:`PERMUTATIONS`.

    Args:
        first: A figure of each prompt in the first run, [P].
        second: The same prompts' in the second run, [P].
    """
    differences = second - first
    estimate = ratio_of_sums(differences, np.ones_like(differences))
    if len(differences) < 2:
        return estimate
    test = stats.permutation_test(
        (differences,),
        np.mean,
        permutation_type="samples",
        vectorized=True,
        n_resamples=PERMUTATIONS,
        batch=BATCH,
        rng=np.random.default_rng(SEED),
    )
    return replace(estimate, p_value=float(test.pvalue))


def holm(p_values: Sequence[float | None]) -> list[float | None]:
    """Adjusted p-values of M tests that keep the family-wise error rate (Holm 1979).

    Args:
        p_values: p-values, [M], in any order; None for a test that could not be made, which does
            not count.

    Returns:
        Adjusted p-values in the same order, None if there was none.
    """
    adjusted: list[float | None] = [None] * len(p_values)
    tests = sorted((value, place) for place, value in enumerate(p_values) if value is not None)
    largest = 0.0
    for rank, (p_value, place) in enumerate(tests):
        largest = max(largest, min(1.0, (len(tests) - rank) * p_value))
        adjusted[place] = largest
    return adjusted
