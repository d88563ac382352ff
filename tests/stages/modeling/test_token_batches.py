from hypothesis import given
from hypothesis import strategies as st

from stages.modeling.token_batches import token_batches


@given(st.lists(st.integers(1, 40), max_size=60), st.integers(1, 100))
def test_batches_hold_every_sequence_once_within_the_budget(lengths, budget):
    batches = list(token_batches(lengths, budget))
    order = [index for batch in batches for index in batch]
    assert sorted(order) == list(range(len(lengths)))
    assert [lengths[index] for index in order] == sorted(lengths, reverse=True)
    for batch in batches:
        longest = lengths[batch[0]]
        assert len(batch) == 1 or longest * len(batch) <= budget
        assert batch is batches[-1] or longest * (len(batch) + 1) > budget


def test_sequences_of_one_length_keep_their_order():
    assert list(token_batches([2, 3, 2, 3], 6)) == [[1, 3], [0, 2]]
