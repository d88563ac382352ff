import re
import statistics
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from stages.contract.errors import UserError
from stages.pair.params import PairParams
from stages.pair.run import STAGE
from stages.pair.select import STRATEGIES
from stages.tables.schemas import PAIRS, read_rows
from tests.stage_calls import EventLog, call, metrics, response, write_scored

UNCERTAIN = Path(__file__).parents[3] / "examples/strategies/uncertain.py"


def scored(question, *scores, **changes):
    return [
        (response(question, sample, "word " * (sample + 1), **changes), score)
        for sample, score in enumerate(scores)
    ]


def pair(store, tables, code=None, *, events=None, seed=0, **params):
    inputs = {"responses": [table[0] for table in tables], "scores": [table[1] for table in tables]}
    if code is not None:
        inputs["code"] = [code]
    settings = PairParams.model_validate(params)
    return call(STAGE, settings, inputs, store, events=events, seed=seed)


def pairs(artifact):
    return list(read_rows(artifact.path / "pairs.parquet", PAIRS))


def test_a_pair_carries_both_responses_as_sampled(store, tmp_path):
    rows = scored("q", 0.25, 0.75, -1.0)
    written = pairs(pair(store, [write_scored(tmp_path, rows)]))
    best = rows[1][0]
    worst = rows[2][0]
    expected = {
        "prompt_id": best["prompt_id"],
        "prompt": best["messages"],
        "prompt_token_ids": best["prompt_token_ids"],
        "tie": False,
        "chosen_score": 0.75,
        "rejected_score": -1.0,
    }
    for side, row in (("chosen", best), ("rejected", worst)):
        expected |= {
            f"{side}_sample_index": row["sample_index"],
            f"{side}_token_ids": row["response_token_ids"],
            f"{side}_logprobs": row["response_logprobs"],
            side: [{"role": "assistant", "content": row["response"]}],
            f"{side}_finish_reason": row["finish_reason"],
        }
    assert written == [expected]


def test_responses_of_the_same_tokens_tie_whatever_their_scores(store, tmp_path):
    rows = [(response("q", sample, "word"), score) for sample, score in enumerate((1.0, 0.0))]
    rows += scored("other", 1.0, 0.0)
    [only] = pairs(pair(store, [write_scored(tmp_path, rows)]))
    assert only["prompt"][0]["content"] == "other"


def test_metrics_by_hand(store, tmp_path):
    rows = [
        *scored("a", 1.0, 0.0),
        *scored("b", 0.5, 0.5, finish_reason="length"),
        *scored("c", None, 9.0),
        *scored("d", -1.0, 2.0),
    ]
    report = metrics(pair(store, [write_scored(tmp_path, rows)]))
    rewards = [1.0, 0.0, 0.5, 0.5, 9.0, -1.0, 2.0]
    assert report == {
        "prompts": 4,
        "responses": 8,
        "pairs": 2,
        "ties": 1,
        "null_scores": 1,
        "prompts_with_null_score": 1,
        "mean_reward": pytest.approx(statistics.mean(rewards)),
        "mean_margin": pytest.approx(2.0),
        "mean_response_tokens": 1.5,
    }


def test_ties_are_dropped_or_kept_and_marked(store, tmp_path):
    tables = [write_scored(tmp_path, [*scored("a", 1.0, 1.0), *scored("b", 0.0, 1.0)])]
    dropped = pair(store, tables)
    kept = pair(store, tables, ties="keep")
    assert [row["tie"] for row in pairs(dropped)] == [False]
    assert [row["tie"] for row in pairs(kept)] == [True, False]
    assert metrics(dropped)["ties"] == metrics(kept)["ties"] == 1


def test_neither_shards_nor_row_groups_change_the_pairs(store, tmp_path):
    # More prompts than a batch holds rows, so that prompts lie across batch borders.
    rows = [row for n in range(1500) for row in scored(f"q{n}", n % 3, n % 5, n % 7)]
    whole = [write_scored(tmp_path, rows, "whole-")]
    shards = [
        write_scored(tmp_path, rows[:999], "first-"),
        write_scored(tmp_path, rows[999:], "second-"),
    ]
    for number, path in enumerate(shards[1]):
        pq.write_table(pq.read_table(path), path, row_group_size=(61, 100)[number])
    one = pairs(pair(store, whole, strategy="best_random", ties="keep"))
    assert one == pairs(pair(store, shards, strategy="best_random", ties="keep"))
    assert len({row["prompt_id"] for row in one}) == len(one) == 1500


def test_prompts_without_a_score_are_warned_of(store, tmp_path):
    rows = [*scored("a", None, 1.0), *scored("b", 0.0, None), *scored("c", 0.0, 1.0)]
    events = EventLog()
    artifact = pair(store, [write_scored(tmp_path, rows)], events=events)
    warnings = [e.message for e in events.events if e.type == "log" and e.level == "warning"]
    assert warnings == ["2 of 6 responses have no score; their 2 prompts make no pair"]
    assert [row["chosen_score"] for row in pairs(artifact)] == [1.0]
    progress = [e for e in events.events if e.type == "progress" and e.unit == "responses"]
    assert (progress[-1].done, progress[-1].total) == (6, 6)


def test_the_seed_and_the_prompt_choose_the_other_response(store, tmp_path):
    rows = [row for name in "abcdef" for row in scored(name, *map(float, range(8)))]
    tables = [write_scored(tmp_path, rows)]

    def chosen(seed, count=1):
        settings = {"strategy": "best_random", "pairs_per_prompt": count}
        artifact = pair(store, tables, seed=seed, **settings)
        return [(row["chosen_score"], row["rejected_score"]) for row in pairs(artifact)]

    # Written down: pairs that were made before are made again.
    assert chosen(0) == [(7, 1), (7, 4), (7, 4), (7, 4), (7, 4), (7, 2)]
    assert chosen(1) == [(7, 6), (7, 3), (7, 2), (7, 0), (7, 0), (7, 2)]
    assert chosen(1, count=3)[:6] == [(7, 6), (5, 4), (3, 0), (7, 3), (6, 2), (5, 1)]


@pytest.mark.parametrize(
    ("rows", "params", "message"),
    [
        ([], {}, "of 0 prompts 0 make a tie"),
        (scored("a", 1.0, 1.0) + scored("b", 0.0, 0.0), {}, "of 2 prompts 2 make a tie"),
        (scored("a", 1.0, 0.0, finish_reason="length"), {"truncated": "drop"}, "1 fewer than two"),
        (scored("a", None, 1.0) + scored("b", None, None), {}, "2 have a response without a"),
        (scored("a", 1.0) + scored("b", 1.0), {}, "2 fewer than two responses"),
    ],
)
def test_nothing_to_train_on_is_a_users_mistake_with_a_remedy(
    store, tmp_path, rows, params, message
):
    with pytest.raises(UserError, match=message) as caught:
        pair(store, [write_scored(tmp_path, rows)], **params)
    assert caught.value.remedy
    assert list(store.artifacts()) == []


def test_bad_tables_are_refused(store, tmp_path):
    good = write_scored(tmp_path, [*scored("a", 1.0, 0.0), *scored("b", 1.0, 0.0)], "good-")
    other = write_scored(tmp_path, [*scored("b", 1.0, 0.0), *scored("a", 1.0, 0.0)], "other-")
    short = write_scored(tmp_path, scored("a", 1.0, 0.0), "short-")
    cases = [
        ([(good[0], other[1])], "does not hold the scores of"),
        ([(good[0], short[1])], "does not hold the scores of"),
        ([(short[0], good[1])], "does not hold the scores of"),
        ([(good[1], good[1])], "does not have the columns of the 'responses' table"),
    ]
    for tables, message in cases:
        with pytest.raises(UserError) as caught:
            pair(store, tables)
        assert message in caught.value.message
        assert caught.value.remedy


def test_further_pairs_of_a_prompt_share_no_response(store, tmp_path):
    tables = [write_scored(tmp_path, scored("q", 1.0, 4.0, 2.0, 3.0, 0.0))]
    rows = pairs(pair(store, tables, pairs_per_prompt=2))
    assert [(row["chosen_score"], row["rejected_score"]) for row in rows] == [
        (4.0, 0.0),
        (3.0, 1.0),
    ]
    # Five responses make two pairs, however many are wanted.
    assert pairs(pair(store, tables, pairs_per_prompt=9)) == rows


def test_cut_off_responses_are_left_out_where_that_is_asked_for(store, tmp_path):
    rows = scored("a", 3.0, 2.0, 1.0) + scored("b", 1.0, 0.0)
    for row, _ in (rows[0], rows[3]):
        row["finish_reason"] = "length"
    tables = [write_scored(tmp_path, rows)]
    assert [row["chosen_score"] for row in pairs(pair(store, tables))] == [3.0, 1.0]
    artifact = pair(store, tables, truncated="drop")
    [kept] = pairs(artifact)
    assert (kept["chosen_score"], kept["rejected_score"]) == (2.0, 1.0)
    assert metrics(artifact)["prompts_cut_off"] == 1


SELECT = """
def select(responses, seed, least="num_tokens"):
    assert responses[0]["messages"][0]["role"] == "user" and responses[0]["components"] == {}
    by_length = sorted(range(len(responses)), key=lambda place: responses[place][least])
    return by_length[0], by_length[1]
"""


def own(tmp_path, code):
    path = tmp_path / "select.py"
    path.write_text(code)
    return path


def test_a_user_s_function_selects_two_and_scores_rank_them(store, tmp_path):
    tables = [write_scored(tmp_path, [*scored("a", 0.0, 2.0, 9.0), *scored("b", 1.0, 0.5, 9.0)])]
    shortest = pair(store, tables, own(tmp_path, SELECT), strategy="python")
    assert [row["chosen_sample_index"] for row in pairs(shortest)] == [1, 0]
    assert [row["rejected_sample_index"] for row in pairs(shortest)] == [0, 1]
    settings = {"settings": {"least": "logprob"}}
    longest = pair(store, tables, own(tmp_path, SELECT), strategy="python", python=settings)
    assert [row["chosen_sample_index"] for row in pairs(longest)] == [2, 2]
    assert [row["rejected_sample_index"] for row in pairs(longest)] == [1, 1]


@pytest.mark.parametrize("found", ["(0, 0)", "(0, 3)", "(-1, 0)", "0", "(0, 1, 2)", "(0.5, 1)"])
def test_what_is_not_two_responses_is_refused(store, tmp_path, found):
    tables = [write_scored(tmp_path, scored("a", 0.0, 2.0, 9.0))]
    code = own(tmp_path, f"def select(responses, seed):\n    return {found}\n")
    with pytest.raises(UserError, match=re.escape(f"select returned {found} for 3 responses")):
        pair(store, tables, code, strategy="python")


def test_the_example_explores_disagreement_and_scores_rank(store, tmp_path):
    # Heads disagree on the last two.
    heads = [(0.1, 0.1), (0.5, 0.5), (2.0, -1.6), (1.5, -0.9)]
    components = [{"one": one, "two": two, "other": 99.0} for one, two in heads]
    tables = write_scored(tmp_path, scored("a", 0.1, 0.5, 0.2, 0.3), components=components)
    function = {"function": "delta_ucb", "settings": {"heads": "one two"}}
    [wide] = pairs(pair(store, [tables], UNCERTAIN, strategy="python", python=function))
    assert (wide["chosen_sample_index"], wide["rejected_sample_index"]) == (3, 2)


def test_hand_computed():
    scores = [0.5, 2.0, -1.0, 2.0]
    assert STRATEGIES["best_worst"](scores, 0) == (1, 2)
    assert STRATEGIES["first_two"](scores, 0) == (1, 0)
    assert [STRATEGIES["best_random"](scores, seed) for seed in range(3)] == [
        (1, 0),
        (1, 2),
        (1, 3),
    ]


@pytest.mark.parametrize("name", STRATEGIES)
def test_at_a_tie_of_two_the_first_sample_stands_in_the_chosen_place(name):
    assert STRATEGIES[name]([1.0, 1.0], 12345) == (0, 1)
