"""Reading pairs: what is used, cut, dropped and refused."""

import numpy as np
import pytest

from stages.contract.errors import UserError
from stages.tables.schemas import PAIRS, read_rows, write_table
from stages.train.data import load_pairs
from stages.train.params import TrainParams
from stages.train.reference import difference_to_sampler
from tests.stages.train.train_helpers import make_pairs


def params(**changes):
    return TrainParams.model_validate({"max_length_tokens": 10, "max_prompt_tokens": 4} | changes)


def write_changed(tmp_path, **changes):
    """A table of one ordinary pair and one with other values."""
    rows = list(read_rows(make_pairs(tmp_path / "plain.parquet", 2, logprob=-3.0), PAIRS))
    rows[0] |= {"prompt_token_ids": [3, 4], "chosen_token_ids": [7], "chosen_logprobs": [-1.0]}
    rows[0] |= {"rejected_token_ids": [8, 9], "rejected_logprobs": [-1.0, -2.0]}
    rows[1] = rows[0] | changes
    path = tmp_path / "pairs.parquet"
    write_table(path, PAIRS, rows)
    return path


def test_token_ids_and_logprobs_come_from_the_table(tmp_path):
    first, second = (
        make_pairs(tmp_path / "a.parquet", 5, logprob=-3.0),
        make_pairs(tmp_path / "b.parquet", 3, seed=1, logprob=-3.0),
    )
    pairs, _ = load_pairs([first, second], params(max_length_tokens=99))
    rows = [*read_rows([first, second], PAIRS)]
    assert len(pairs) == len(rows) == 8
    for index, (pair, row) in enumerate(zip(pairs, rows, strict=True)):
        assert (pair.index, pair.prompt_id) == (index, row["prompt_id"])
        assert pair.prompt.tolist() == row["prompt_token_ids"]
        assert pair.rejected.token_ids.tolist() == row["rejected_token_ids"]
        assert pair.chosen.logprobs.tolist() == row["chosen_logprobs"]


def test_an_over_long_pair_is_cut_at_its_outer_ends(tmp_path):
    long = {
        "prompt_token_ids": list(range(20)),
        "chosen_token_ids": list(range(30, 45)),
        "chosen_logprobs": [-float(index) for index in range(15)],
    }
    pairs, num_truncated = load_pairs([write_changed(tmp_path, **long)], params())
    assert (len(pairs), num_truncated) == (2, 1)
    assert pairs[1].prompt.tolist() == [16, 17, 18, 19]
    assert pairs[1].chosen.token_ids.tolist() == [30, 31, 32, 33, 34, 35]
    assert pairs[1].rejected.token_ids.tolist() == [8, 9]
    # The sampler's log-probabilities are those after the whole prompt.
    assert np.isnan(pairs[1].chosen.logprobs).all()
    pairs, _ = load_pairs([write_changed(tmp_path, **long | {"prompt_token_ids": [1]})], params())
    assert pairs[1].chosen.logprobs.tolist() == [-float(index) for index in range(9)]


def test_a_pair_at_the_limit_is_left_alone(tmp_path):
    path = write_changed(tmp_path, prompt_token_ids=list(range(8)))
    pairs, num_truncated = load_pairs([path], params())
    assert num_truncated == 0
    assert len(pairs[1].prompt) == 8


def test_ties_alone_are_refused_unless_another_term_learns_from_them(tmp_path):
    path = make_pairs(tmp_path / "pairs.parquet", 4, ties=range(4))
    with pytest.raises(UserError, match="all 4 pairs are ties"):
        load_pairs([path], params(design="none"))
    assert len(load_pairs([path], params(design="one_minus_pi"))[0]) == 4
    with pytest.raises(UserError, match="all 4 pairs are ties"):
        load_pairs([path], params(design="one_minus_pi", kappa=0.0))
    # κ would be a share of nothing, and the bonus off.
    with pytest.raises(UserError, match="all 4 pairs are ties"):
        load_pairs([path], params(design="one_minus_pi", target_ratio=0.1))
    # Without a bonus, a preset's share weighs nothing.
    for share in (None, 0.1):
        likelihood = params(design="none", nll_weight=1.0, target_ratio=share)
        assert len(load_pairs([path], likelihood)[0]) == 4


def test_the_difference_to_the_sampler_leaves_unknown_values_out(tmp_path):
    """A server that gave a response without log-probabilities: NaN in the table."""
    path = write_changed(tmp_path, chosen_logprobs=[float("nan")])
    pairs, _ = load_pairs([path], params())
    reference = {
        pair.index: (np.array([-1.5]), pair.rejected.logprobs.astype(float) - 0.5) for pair in pairs
    }
    gap = difference_to_sampler(pairs, reference)
    assert (gap["mean"], gap["max"]) == (pytest.approx(0.5), pytest.approx(0.5))
    unknown = {index: tuple(side * np.nan for side in sides) for index, sides in reference.items()}
    assert difference_to_sampler(pairs, unknown) == {"mean": None, "max": None}
