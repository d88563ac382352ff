import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stages.generate.filling import split_chunks
from stages.generate.shards import expected_tokens, shard_bounds
from tests.stage_calls import write_prompts


def bounds(tokens, num_shards):
    return [shard_bounds(np.array(tokens), index, num_shards) for index in range(num_shards)]


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=80), st.integers(1, 12))
def test_every_prompt_is_in_one_shard_and_none_is_far_from_its_share(tokens, num_shards):
    cuts = bounds(tokens, num_shards)
    covered = [row for first, stop in cuts for row in range(first, stop)]
    assert covered == list(range(len(tokens)))
    if len(tokens) >= num_shards:
        assert all(first < stop for first, stop in cuts)
    if max(tokens) * num_shards <= sum(tokens):
        share = sum(tokens) / num_shards
        for first, stop in cuts:
            assert abs(sum(tokens[first:stop]) - share) <= max(tokens) + 1


def test_long_prompts_make_shards_of_fewer():
    assert bounds([900] * 2 + [100] * 18, 2) == [(0, 2), (2, 20)]
    assert bounds([100] * 18 + [900] * 2, 2) == [(0, 18), (18, 20)]


@pytest.fixture
def prompts(tmp_path):
    turns = [
        {"role": "user", "content": "x" * 40},
        {"role": "assistant", "content": "y" * 40},
        {"role": "user", "content": ""},
    ]
    return write_prompts(tmp_path / "prompts.parquet", ["a" * 400, "日" * 40, turns, "z" * 4000])


def test_all_turns_count_by_their_bytes_and_every_response_is_added(prompts):
    found = expected_tokens(prompts, response_tokens=100, longest=10_000)
    assert found.tolist() == [201, 131, 121, 1101]


def test_what_cannot_fit_the_context_does_not_weigh_more_than_it(prompts):
    assert expected_tokens(prompts, response_tokens=0, longest=200).tolist() == [101, 31, 21, 200]


def test_chunks_of_another_size_have_other_files(tmp_path):
    small, large = (split_chunks(tmp_path, 0, 12, size) for size in (4, 6))
    assert not {each.path for each in small} & {each.path for each in large}
