"""Several rewards of a response: normalised one by one, clipped, weighed."""

from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from stages.contract.errors import UserError
from stages.pair.params import PairParams
from stages.tables.schemas import SCORES, read_rows, write_table
from tests.stage_calls import write_scored
from tests.stages.pair.test_pair_run import metrics, pair, pairs, scored

PARTS = [(0.0, 10.0), (1.0, 30.0), (1.0, 20.0), (0.0, 10.5), (0.0, -900.0), (1.0, 10.0)]
"""Two components, of two prompts with three responses of 1, 2 and 3 tokens each."""
WEIGHTS = {"right": 1.0, "style": 0.25, "response_tokens": -0.5}


def with_parts(folder: Path, parts: list[tuple[float, float]] = PARTS) -> list[tuple[Path, Path]]:
    rows = [*scored("a", *(style for _, style in parts[:3])), *scored("b", 1.0, 2.0, 3.0)]
    responses, scores = write_scored(folder, rows)
    named = [{"right": right, "style": style} for right, style in parts]
    table = [
        {**row, "components": own}
        for row, own in zip(read_rows(scores, SCORES), named, strict=True)
    ]
    write_table(scores, SCORES, table)
    return [(responses, scores)]


def independent_totals(normalise: str, clip: float | None) -> np.ndarray:
    """The weighted sums of the two prompts, [2, 3], by scipy and numpy over whole columns."""
    values = np.array([(*own, 1 + place % 3) for place, own in enumerate(PARTS)]).reshape(2, 3, 3)
    if normalise == "prompt":
        values = stats.zscore(values, axis=1)
    elif normalise == "batch":
        values = stats.zscore(values.reshape(6, 3)).reshape(2, 3, 3)
    values = values if clip is None else np.clip(values, -clip, clip)
    return values @ np.array(list(WEIGHTS.values()))


@pytest.mark.parametrize("clip", [None, 0.75])
@pytest.mark.parametrize("normalise", ["none", "batch", "prompt"])
def test_rewards_are_normalised_one_by_one_and_weighed(store, tmp_path, normalise, clip):
    if clip is not None and normalise == "none":
        with pytest.raises(ValueError, match=r"clip = 0\.75 with normalise = 'none'"):
            PairParams(rewards=WEIGHTS, normalise=normalise, clip=clip)
        return
    asked = {"rewards": WEIGHTS, "normalise": normalise, "clip": clip}
    made = pair(store, with_parts(tmp_path), **asked)
    totals = independent_totals(normalise, clip)
    for row, expected in zip(pairs(made), totals, strict=True):
        assert row["chosen_score"] == pytest.approx(expected.max(), rel=1e-12)
        assert row["rejected_score"] == pytest.approx(expected.min(), rel=1e-12)
        assert row["chosen_sample_index"] == expected.argmax()
    columns = np.array([(*own, 1 + place % 3) for place, own in enumerate(PARTS)]).T
    found = metrics(made)
    assert found["mean_reward"] == pytest.approx((10 + 30 + 20 + 1 + 2 + 3) / 6), "the oracle's"
    assert found["rewards"]["style"] == {
        "mean": pytest.approx(columns[1].mean()),
        "std": pytest.approx(columns[1].std()),
    }
    known = np.corrcoef(columns)
    assert found["reward_correlations"] == [
        ["right", "style", pytest.approx(known[0, 1])],
        ["right", "response_tokens", pytest.approx(known[0, 2])],
        ["style", "response_tokens", pytest.approx(known[1, 2])],
    ]


def test_a_reward_with_a_large_spread_does_not_decide_alone(store, tmp_path):
    tables = with_parts(tmp_path, [(1.0, 100.0), (0.0, 140.0), (1.0, 130.0)] * 2)
    weights = {"right": 2.0, "style": 1.0}
    chosen = [
        pairs(pair(store, tables, rewards=weights, normalise=each))[0]["chosen_sample_index"]
        for each in ("none", "prompt")
    ]
    assert chosen == [1, 2], "the wrong answer of the best style, then a right one"


def test_shards_do_not_change_what_rewards_are_normalised_by(store, tmp_path):
    rows = [row for n in range(50) for row in scored(f"q{n}", n % 3, n % 5, n % 7)]
    weights = {"score": 1.0, "response_tokens": -0.3}
    parts = [write_scored(tmp_path, rows[:75], "a-"), write_scored(tmp_path, rows[75:], "b-")]
    made = [
        pair(store, each, rewards=weights, ties="keep")
        for each in ([write_scored(tmp_path, rows)], parts)
    ]
    one, two = map(pairs, made)
    for mine, other in zip(one, two, strict=True):
        assert mine["chosen_score"] == pytest.approx(other["chosen_score"], rel=1e-9)
        assert mine["chosen_sample_index"] == other["chosen_sample_index"]


def test_rewards_that_no_response_has_are_named_and_null_scores_leave_prompts_out(store, tmp_path):
    with pytest.raises(UserError, match=r"pair\.rewards names 'wit', .* right, style"):
        pair(store, with_parts(tmp_path), rewards={"right": 1.0, "wit": 1.0})
    rows = [*scored("a", None, 1.0), *scored("b", 0.0, 1.0)]
    made = pair(store, [write_scored(tmp_path, rows)], rewards={"score": 1.0})
    assert [row["chosen_score"] for row in pairs(made)] == [pytest.approx(0.5**0.5)]


def test_normalisation_without_rewards_is_refused():
    with pytest.raises(ValueError, match="without rewards, which they are for"):
        PairParams(normalise="prompt")
