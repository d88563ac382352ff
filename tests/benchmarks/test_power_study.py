"""The analysis of the study with power, on made-up runs."""

import math

import pytest

from benchmarks.power_study import differences, table

BASELINE = [0.2, 0.3, 0.1, 0.4]
BETTER = [0.5, 0.4, 0.5, 0.5]


def lines(task="a"):
    rewards = {"f-DPO": BASELINE, "GEB-π": BETTER}
    return [
        {"task": task, "method": method, "seed": seed, "mean_reward": value}
        for method, values in rewards.items()
        for seed, value in enumerate(values)
    ]


def test_methods_are_paired_by_seed():
    # Shuffled lines, and one seed that the baseline lacks.
    shuffled = [*reversed(lines()), {**lines()[-1], "seed": 9, "mean_reward": 1.0}]
    [row] = differences(shuffled)
    pairs = [b - a for a, b in zip(BASELINE, BETTER, strict=True)]
    mean = sum(pairs) / 4
    error = math.sqrt(sum((pair - mean) ** 2 for pair in pairs) / 3 / 4)
    # The 97.5 % quantile of Student's t with three degrees of freedom, from a printed table.
    half = 3.1824 * error
    assert (row.task, row.method, row.seeds) == ("a", "GEB-π", 4)
    assert row.difference == pytest.approx(mean)
    assert (row.low, row.high) == pytest.approx((mean - half, mean + half), abs=1e-4)


def test_the_table_has_a_row_for_each_bonus():
    text = table([*lines(), *lines("b")])
    assert text.count("| GEB-π | 4 |") == 2
    [row] = differences(lines())
    # Holm doubles both of two equal p-values.
    assert text.count(f"| {row.p:.3f} | {2 * row.p:.3f} |") == 2
