"""Intervals and tests of reports against published numbers, scipy's own, and cases done by hand."""

from itertools import product

import numpy as np
import pytest
from scipy import stats

from flows.report.statistics import holm, over_seeds, paired_difference, welch
from stages.evaluate.statistics import SEED, pass_at_k, ratio_of_sums

# Darwin's maize, cross- less self-fertilised heights in eighths of an inch, in Fisher, The Design
# of Experiments (1935), §17 and §21: t = 2.148, 5 % interval from 0.03 to 41.8 eighths; of all 2^15
# patterns of signs 863 have a sum as large, so that p = 0.05267 two-sided.
MAIZE = [49, -67, 8, 16, 6, 23, 28, 41, 14, 29, 56, 24, 75, 60, -48]


def test_darwin_s_maize_has_fisher_s_interval_and_p_value():
    estimate = over_seeds(MAIZE)
    assert estimate.value == pytest.approx(314 / 15)
    assert estimate.interval == pytest.approx((0.03, 41.84), abs=0.01)
    # Fifteen pairs have more patterns of signs than are drawn: a sample of them.
    estimate = paired_difference(np.zeros(15), np.array(MAIZE, float))
    assert estimate.p_value == pytest.approx(0.0527, abs=0.006)
    assert estimate.value == pytest.approx(314 / 15)


def test_the_permutation_test_is_exact_for_few_prompts():
    differences = np.array([1.0, 2.0, 3.0, -0.5])
    sums = [np.dot(signs, differences) for signs in product([1, -1], repeat=4)]
    as_large = sum(abs(total) >= abs(differences.sum()) - 1e-12 for total in sums)
    estimate = paired_difference(np.zeros(4), differences)
    assert estimate.p_value == pytest.approx(as_large / 16)


def test_the_bootstrap_is_scipy_s():
    totals, counts = np.array([0.5, 3.0, 2.0, 7.0, 1.0]), np.array([1.0, 4.0, 2.0, 8.0, 3.0])
    expected = stats.bootstrap(
        (totals, counts),
        lambda own, by, axis=-1: own.sum(axis=axis) / by.sum(axis=axis),
        paired=True,
        vectorized=True,
        n_resamples=4000,
        batch=250,
        method="percentile",
        rng=np.random.default_rng(SEED),
    ).confidence_interval
    estimate = ratio_of_sums(totals, counts)
    assert estimate.interval == pytest.approx((expected.low, expected.high), rel=1e-12)


def test_samples_of_a_prompt_are_one_observation():
    # 20 prompts whose 50 samples all agree hold the information of 20 observations, not of 1000.
    means = np.array([0.0, 1.0] * 10)
    clustered = ratio_of_sums(means * 50, np.full(20, 50.0))
    each_prompt_once = ratio_of_sums(means, np.ones(20))
    assert clustered.value == 0.5
    assert clustered.interval == each_prompt_once.interval
    low, high = clustered.interval or (0, 0)
    assert 0.38 < high - low < 0.5, "2 · 1.96 · 0.5 / √20 is 0.44"


def test_one_prompt_has_no_interval():
    assert ratio_of_sums(np.array([3.0]), np.array([2.0])).interval is None
    assert paired_difference(np.zeros(1), np.ones(1)).p_value is None


def test_welch_s_test_is_of_runs_whose_spread_differs():
    # The first example in Wikipedia's article on it: t = −2.46, ν = 25.0, p = 0.021.
    first = [27.5, 21.0, 19.0, 23.6, 17.0, 17.9, 16.9, 20.1, 21.9, 22.6, 23.1, 19.6, 19.0, 21.7]
    first += [21.4]
    second = [27.1, 22.0, 20.8, 23.4, 23.4, 23.5, 25.8, 22.0, 24.8, 20.2, 21.9, 22.1, 22.9, 20.5]
    second += [24.4]
    estimate = welch(first, second)
    assert estimate.value == pytest.approx(np.mean(second) - np.mean(first))
    assert estimate.p_value == pytest.approx(0.021, abs=5e-4)
    low, high = estimate.interval or (0, 0)
    assert low > 0
    assert (low + high) / 2 == pytest.approx(estimate.value)


def test_welch_s_test_allows_one_method_without_spread():
    spread = [0.90, 1.00, 0.95, 0.97]
    estimate = welch([1.0] * 5, spread)
    alone = stats.ttest_1samp(spread, 1.0)
    assert estimate.p_value == pytest.approx(alone.pvalue)
    assert estimate.interval == pytest.approx(np.array(alone.confidence_interval(0.95)) - 1.0)


@pytest.mark.parametrize(
    ("first", "second"), [([1.0], [2.0, 3.0]), ([1.0, 2.0], [2.0]), ([0.1] * 3, [0.2] * 3)]
)
def test_seeds_that_are_one_or_do_not_vary_are_not_tested(first, second):
    estimate = welch(first, second)
    assert estimate.value == pytest.approx(np.mean(second) - np.mean(first))
    assert (estimate.interval, estimate.p_value) == (None, None)


def test_holm_s_adjustment_equals_r_s_p_adjust():
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.9, 0.8]) == [1.0, 1.0]
    assert holm([0.5]) == [0.5]
    assert holm([]) == []
    assert holm([None, 0.02, None, 0.03]) == [None, 0.04, None, 0.04], "no test, no adjustment"


def test_pass_at_k_is_chen_s_estimator():
    # The published code: 1 - np.prod(1.0 - k / np.arange(n - c + 1, n + 1)).
    n, k = 200, 100
    for c in (3, 150, 0, 200):
        expected = 1.0 if n - c < k else 1.0 - np.prod(1.0 - k / np.arange(n - c + 1, n + 1))
        assert pass_at_k(c, n, k) == pytest.approx(expected, abs=1e-12)
