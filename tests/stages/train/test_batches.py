"""Which pairs make up which step."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stages.train.batches import MicroBatches, Plan, collate, pad_responses
from stages.train.data import Pair, Response
from stages.train.reference import sampler_logprobs


def make_pair(index: int, prompt: int, chosen: int, rejected: int) -> Pair:
    """A pair of given lengths whose tokens and log-probabilities tell where they came from."""

    def response(length: int, side: int) -> Response:
        ids = np.arange(length, dtype=np.int32) + 10 * side + 100 * index
        return Response(ids, -ids.astype(np.float32))

    ids = np.arange(prompt, dtype=np.int32) + 1
    return Pair(index, str(index), ids, response(chosen, 1), response(rejected, 2), tie=False)


def make_plan(**changes: int) -> Plan:
    fields = {
        "num_pairs": 10,
        "epochs": 2,
        "global_batch": 4,
        "micro_batch": 2,
        "world_size": 1,
        "seed": 0,
    }
    return Plan(**fields | changes)


@given(
    num_pairs=st.integers(1, 40),
    global_batch=st.integers(1, 16),
    micro_batch=st.integers(1, 5),
    world_size=st.integers(1, 4),
)
def test_every_pair_is_seen_once_an_epoch_whatever_the_layout(
    num_pairs, global_batch, micro_batch, world_size
):
    plan = make_plan(
        num_pairs=num_pairs,
        global_batch=global_batch,
        micro_batch=micro_batch,
        world_size=world_size,
    )
    lengths = [(7 * place) % 5 for place in range(num_pairs)]
    for epoch in range(plan.epochs):
        seen = []
        for batch in range(plan.steps_per_epoch):
            step = epoch * plan.steps_per_epoch + batch
            dealt = plan.micro_batches(step, lengths)
            assert len(dealt) == plan.accumulation
            assert all(len(parts) == world_size for parts in dealt)
            assert all(len(part) <= micro_batch for parts in dealt for part in parts)
            pairs = sorted(place for parts in dealt for part in parts for place in part)
            assert pairs == sorted(plan.pairs_of(step))
            seen += pairs
        assert sorted(seen) == list(range(num_pairs))


def test_the_pairs_of_a_step_depend_on_the_seed_but_not_on_the_layout():
    steps = range(make_plan().num_steps)
    order = [make_plan().pairs_of(step) for step in steps]
    wide = make_plan(micro_batch=1, world_size=3)
    assert [sorted(wide.pairs_of(step)) for step in steps] == [sorted(step) for step in order]
    assert [make_plan(seed=1).pairs_of(step) for step in steps] != order
    assert order[: len(order) // 2] != order[len(order) // 2 :]


def test_rows_of_like_length_meet():
    plan = make_plan(num_pairs=8, global_batch=8, micro_batch=2, world_size=2)
    dealt = plan.micro_batches(0, [1, 9, 1, 9, 5, 5, 3, 3])
    by_micro = [[sorted(part) for part in parts] for parts in dealt]
    assert by_micro == [[[1, 3], [4, 5]], [[6, 7], [0, 2]]]


def test_a_process_without_pairs_takes_part_with_weight_zero():
    pairs = [make_pair(index, 2, 3, 1 + index) for index in range(3)]
    plan = make_plan(num_pairs=3, epochs=1, global_batch=4, micro_batch=1, world_size=2)
    weights = [
        [float(batch["weight"]) * (len(batch["tie"]))]
        for rank in range(2)
        for batch in (
            MicroBatches(pairs, sampler_logprobs(pairs), plan, rank)[index] for index in range(2)
        )
    ]
    assert sum(weight for [weight] in weights) == pytest.approx(1.0)
    assert weights.count([0.0]) == 1


def test_collated_rows_hold_the_sampled_ids_and_their_places():
    pairs = [make_pair(0, 2, 3, 1), make_pair(1, 1, 1, 2)]
    batch = collate(pairs)
    assert batch["input_ids"].tolist() == [
        [1, 2, 10, 11, 12],
        [1, 110, 0, 0, 0],
        [1, 2, 20, 0, 0],
        [1, 120, 121, 0, 0],
    ]
    flat = batch["input_ids"].flatten()
    # The output at a place predicts the token after it.
    assert flat[batch["source_index"] + 1].tolist() == batch["targets"].tolist()
    assert batch["targets"].tolist() == [10, 11, 12, 110, 20, 120, 121]
    assert batch["response_mask"].sum(dim=1).tolist() == [3, 1, 1, 2]


def test_reference_values_lie_where_the_policy_s_do():
    pairs = [make_pair(0, 2, 3, 1), make_pair(1, 1, 1, 2)]
    plan = make_plan(num_pairs=2, epochs=1, global_batch=2, micro_batch=2)
    batch = MicroBatches(pairs, sampler_logprobs(pairs), plan, 0)[0]
    policy = pad_responses(-batch["targets"].float(), batch["response_mask"])
    assert torch.equal(batch["ref_logprobs"], policy)
