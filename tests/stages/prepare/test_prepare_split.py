"""Properties of the division, over arbitrary multisets of prompts."""

import hashlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stages.contract.errors import UserError
from stages.prepare.split import DROPPED, TEST, as_ids, split


def identity(number):
    return hashlib.sha256(str(number).encode()).digest()[:16]


def divide(train, test=None, *, seed=0, **changes):
    numbers = [prompt for source in train for prompt in source] + (test or [])
    labels = [label for label, source in enumerate(train, 1) for _ in source]
    labels += [0] * len(test or [])
    settings = {"iterations": 3, "test_prompts": 2, "prompts_per_iteration": None} | changes
    division = split(
        as_ids(b"".join(identity(number) for number in numbers)),
        np.array(labels, dtype=np.int32),
        seed=seed,
        **settings,
    )
    return division, numbers


def members(division, numbers, part):
    return {number for number, where in zip(numbers, division.part, strict=True) if where == part}


rows = st.lists(st.integers(0, 60), min_size=1, max_size=120)


@given(rows=rows, seed=st.integers(0, 5), iterations=st.integers(1, 5))
def test_one_source_is_divided_evenly_and_no_prompt_is_lost(rows, seed, iterations):
    distinct = set(rows)
    if len(distinct) < iterations + 2:
        return
    division, numbers = divide([rows], seed=seed, iterations=iterations)
    parts = [members(division, numbers, part) for part in range(iterations + 1)]
    assert set.union(*parts) == distinct
    assert sum(len(part) for part in parts) == len(distinct)
    assert len(parts[TEST]) == 2
    sizes = [len(part) for part in parts[1:]]
    assert max(sizes) - min(sizes) <= 1
    assert division.duplicates == len(rows) - len(distinct)
    assert np.count_nonzero(division.part == DROPPED) == division.duplicates


@given(rows=rows, seed=st.integers(0, 5), order=st.randoms())
def test_the_order_of_rows_does_not_matter(rows, seed, order):
    if len(set(rows)) < 5:
        return
    shuffled = rows.copy()
    order.shuffle(shuffled)
    one, numbers = divide([rows], seed=seed)
    other, shuffled_numbers = divide([shuffled], seed=seed)
    for part in range(4):
        assert members(one, numbers, part) == members(other, shuffled_numbers, part)


@given(train=rows, test=rows, seed=st.integers(0, 5))
def test_no_test_prompt_is_a_training_prompt(train, test, seed):
    left = set(train) - set(test)
    if len(left) < 3:
        return
    division, numbers = divide([train], test, seed=seed)
    assert members(division, numbers, TEST) == set(test)
    trained = set.union(*(members(division, numbers, part) for part in (1, 2, 3)))
    assert trained == left
    assert division.overlap == len(set(train) & set(test))


def test_the_overlap_may_be_taken_from_the_test_set():
    changes = {"overlap_stays_in_train": True}
    division, numbers = divide([[1, 2, 3], [3, 4], [5, 5, 6]], [6, 7, 7, 1], **changes)
    assert [members(division, numbers, part) for part in (1, 2, 3)] == [{1, 2, 3}, {4}, {5, 6}]
    assert members(division, numbers, TEST) == {7}
    assert (division.duplicates, division.overlap) == (3, 2)
    with pytest.raises(UserError, match="all 2 prompts of the `test` source"):
        divide([[1, 2, 3, 4]], [1, 2], **changes)


@given(seed=st.integers(0, 20))
def test_a_cap_chooses_by_seed(seed):
    whole, numbers = divide([list(range(30))], seed=seed)
    capped, _ = divide([list(range(30))], seed=seed, prompts_per_iteration=4)
    assert [len(members(capped, numbers, part)) for part in (1, 2, 3)] == [4, 4, 4]
    assert members(capped, numbers, TEST) == members(whole, numbers, TEST)


@given(seed=st.integers(0, 20), cap=st.integers(1, 5))
def test_more_iterations_keep_the_capped_parts_of_the_first_ones(seed, cap):
    three, numbers = divide([list(range(27))], seed=seed, prompts_per_iteration=cap)
    five, _ = divide([list(range(27))], seed=seed, prompts_per_iteration=cap, iterations=5)
    for part in (TEST, 1, 2, 3):
        assert members(three, numbers, part) == members(five, numbers, part)


def test_holding_out_everything_is_refused():
    with pytest.raises(UserError, match="test_prompts is 4, but there are only 4") as caught:
        divide([[1, 2, 3, 4, 4]], test_prompts=4)
    assert "lower prepare.test_prompts" in caught.value.remedy


def test_an_empty_part_is_refused():
    with pytest.raises(UserError, match="no prompts are left for iteration 2 of 3"):
        divide([[1, 2], [2, 1], [3]], [9])
    # Also where prompts of the first source alone are left, which would do for all iterations.
    with pytest.raises(UserError, match="no prompts are left for iteration 2 of 3"):
        divide([[1, 2, 3], [3, 2], [1]], [9])
    with pytest.raises(UserError, match="no prompts are left for iteration"):
        divide([[1, 2, 3]], test_prompts=1)
