from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn

from stages.generate.grouped_attention import grouped_attention
from stages.generate.transformers_backend import draw_tokens, filtered_probabilities, uniforms

LOGITS = torch.tensor([[2.0, 1.0, 0.0, -1.0, -3.0]])
CHI_SQUARE_4 = 18.47  # 0.1 % point of χ² with four degrees of freedom.


def draws(count, *, temperature):
    uniform = torch.from_numpy(uniforms(7, count))
    return draw_tokens(LOGITS.expand(count, -1), uniform, temperature=temperature, top_p=1.0)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draws_follow_the_softmax(temperature):
    count = 20_000
    observed = torch.bincount(draws(count, temperature=temperature), minlength=5).double()
    expected = torch.softmax(LOGITS[0].double() / temperature, -1) * count
    assert float(((observed - expected) ** 2 / expected).sum()) < CHI_SQUARE_4


def test_top_p_keeps_the_smallest_set_that_reaches_it():
    # softmax of LOGITS: .636 .234 .086 .032 .004
    kept = filtered_probabilities(LOGITS, temperature=1.0, top_p=0.8)[0]
    assert (kept > 0).tolist() == [True, True, False, False, False]
    assert float(kept.sum()) == pytest.approx(1)
    assert float(kept[0] / kept[1]) == pytest.approx(np.e)


@pytest.mark.parametrize("top_p", [0.1, 0.9])
def test_top_p_takes_the_first_of_equal_tokens(top_p):
    logits = torch.randn(4, 6000, generator=torch.Generator().manual_seed(0)).round()
    ranks = logits.double().softmax(-1).sort(dim=-1, descending=True, stable=True)
    num_kept = (ranks.values.cumsum(-1) - ranks.values < top_p).sum(-1).tolist()
    kept = filtered_probabilities(logits, temperature=1.0, top_p=top_p) > 0
    for row, ids, count in zip(kept, ranks.indices, num_kept, strict=True):
        assert set(row.nonzero()[:, 0].tolist()) == set(ids[:count].tolist())


@example([0.0, 20.0], 0.0)  # Exactly on the boundary of a filtered token.
@given(st.lists(st.floats(-20, 20), min_size=2, max_size=8), st.floats(0, 1, exclude_max=True))
def test_a_filtered_token_is_never_drawn(logits, uniform):
    row = torch.tensor([logits])
    token = draw_tokens(
        row, torch.tensor([uniform], dtype=torch.float64), temperature=1.0, top_p=0.5
    )
    assert filtered_probabilities(row, temperature=1.0, top_p=0.5)[0, token[0]] > 0


def test_the_last_uniform_number_stays_in_the_vocabulary():
    largest = torch.tensor([1 - 2.0**-53], dtype=torch.float64)
    for seed in range(200):
        row = torch.randn(1, 7, generator=torch.Generator().manual_seed(seed))
        assert draw_tokens(row, largest, temperature=1.0, top_p=1.0).item() == 6


def test_a_longer_response_goes_on_with_the_same_numbers():
    assert np.array_equal(uniforms(3, 10), uniforms(3, 100)[:10])
    assert not np.array_equal(uniforms(3, 10), uniforms(4, 10))


@pytest.mark.parametrize("key_heads", [1, 2, 4])
def test_heads_in_groups_attend_as_each_alone(key_heads):
    torch.manual_seed(0)
    rows, heads, places, width = 3, 4, 5, 8
    query = torch.randn(rows, heads, 1, width)
    key, value = torch.randn(2, rows, key_heads, places, width)
    mask = torch.ones(rows, 1, 1, places, dtype=torch.bool)
    mask[1, ..., :3] = False
    attended, _ = grouped_attention(nn.Module(), query, key, value, mask, scaling=0.3)
    for row, head in product(range(rows), range(heads)):
        group = head * key_heads // heads
        scores = 0.3 * key[row, group] @ query[row, head, 0]
        weights = scores.where(mask[row, 0, 0], -torch.inf).softmax(-1)
        torch.testing.assert_close(attended[row, 0, head], weights @ value[row, group])
