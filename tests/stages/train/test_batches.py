"""Batches: the pairs of each step."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stages.train.data import Pair, Response, padded_logprobs
from stages.train.params import TrainParams
from stages.training.batches import ROWS, Plan


def make_pair(index, prompt, chosen, rejected):
    """A pair of given lengths whose tokens and log-probabilities tell where they came from."""

    def response(length, side):
        ids = np.arange(length, dtype=np.int32) + 10 * side + 100 * index
        return Response(ids, -ids.astype(np.float32), 0.0)

    ids = np.arange(prompt, dtype=np.int32) + 1
    return Pair(index, str(index), ids, response(chosen, 1), response(rejected, 2), tie=False)


def make_plan(pairs, *, global_batch=4, world_size=1, seed=0, **changes):
    params = TrainParams(**{"epochs": 2, "micro_batch_tokens": 20} | changes)
    return Plan(pairs, params, global_batch, world_size, seed)


def indices(plan, step):
    return [pair.index for pair in plan.samples_of(step)]


def odd_pairs(num_pairs):
    return [
        make_pair(place, 1 + place % 3, 1 + (7 * place) % 5, 1 + (5 * place) % 11)
        for place in range(num_pairs)
    ]


@given(
    num_pairs=st.integers(1, 40),
    global_batch=st.integers(1, 16),
    budget=st.integers(1, 60),
    world_size=st.integers(1, 4),
    row_layout=st.sampled_from(["packed", "padded"]),
)
def test_every_pair_is_seen_once_an_epoch_whatever_the_layout(
    num_pairs, global_batch, budget, world_size, row_layout
):
    plan = make_plan(
        odd_pairs(num_pairs),
        global_batch=global_batch,
        micro_batch_tokens=budget,
        world_size=world_size,
        row_layout=row_layout,
    )
    for epoch in range(plan.params.epochs):
        seen = []
        for batch in range(plan.steps_per_epoch):
            step = epoch * plan.steps_per_epoch + batch
            dealt = plan.micro_batches(step)
            assert len(dealt) == plan.accumulation
            assert all(len(parts) == world_size for parts in dealt)
            for part in (part for parts in dealt for part in parts):
                if len(part) > 1:
                    rows = ROWS[row_layout](part)
                    assert rows.input_ids.numel() <= budget
            pairs = sorted(pair.index for parts in dealt for part in parts for pair in part)
            assert pairs == indices(plan, step)
            seen += pairs
        assert sorted(seen) == list(range(num_pairs))


def test_the_seed_and_not_the_layout_chooses_a_step_s_pairs():
    plan = make_plan(odd_pairs(10))
    steps = range(plan.num_steps)
    order = [indices(plan, step) for step in steps]
    wide = make_plan(odd_pairs(10), micro_batch_tokens=1, world_size=3, row_layout="padded")
    assert [indices(wide, step) for step in steps] == order
    assert [indices(make_plan(odd_pairs(10), seed=1), step) for step in steps] != order
    assert order[: len(order) // 2] != order[len(order) // 2 :]


def test_processes_have_about_as_much_to_do():
    pairs = [make_pair(place, 2, 1 + 9 * (place % 4), 3) for place in range(32)]
    plan = make_plan(pairs, global_batch=32, world_size=4, micro_batch_tokens=100)
    for parts in plan.micro_batches(0):
        loads = [sum(pair.num_tokens_shared for pair in part) for part in parts]
        assert max(loads) - min(loads) <= 9


def test_a_process_without_pairs_takes_part_with_weight_zero():
    pairs = [make_pair(index, 2, 3, 1 + index) for index in range(3)]
    plan = make_plan(pairs, epochs=1, micro_batch_tokens=1, world_size=2)
    weights = [
        batch.weight * len(batch.samples)
        for rank in range(2)
        for batch in plan.batches(0, rank)[:2]
    ]
    assert sum(weights) == pytest.approx(1.0)
    assert weights.count(0.0) == 1


@pytest.mark.parametrize("row_layout", ["packed", "padded"])
def test_reference_values_lie_where_the_policy_s_do(row_layout):
    pairs = [make_pair(0, 2, 3, 1), make_pair(1, 1, 1, 2)]
    rows = ROWS[row_layout](pairs)
    policy = rows.pad_responses(-rows.targets.float())
    sampled = {pair.index: (pair.chosen.logprobs, pair.rejected.logprobs) for pair in pairs}
    assert torch.equal(padded_logprobs(pairs, sampled), policy)
