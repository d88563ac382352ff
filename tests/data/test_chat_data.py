"""The chat task: its oracle judges as it says."""

import json

import pytest

from tests.data.task_files import load, rows


def test_rules_of_the_two_files_differ():
    def rules(name):
        prompts = rows("chat", name)
        assert len({row["prompt"] for row in prompts}) == len(prompts)
        rule_lists = [json.loads(row["reference_answer"])["rules"] for row in prompts]
        return {json.dumps(rule) for pair in rule_lists for rule in pair}

    assert len(rules("prompts.jsonl")) == 16
    assert not rules("prompts.jsonl") & rules("other.jsonl")


@pytest.mark.parametrize(
    ("rule", "kept", "broken"),
    [
        ({"rule": "lowercase"}, "a river runs by.", "A river runs by."),
        ({"rule": "uppercase"}, "A RIVER RUNS BY.", "A River runs by."),
        ({"rule": "no_commas"}, "A river runs by.", "A river runs, it is said."),
        ({"rule": "at_most", "words": 4}, "A river runs by.", "A river runs by here."),
        ({"rule": "begins_with", "text": "Today"}, "Today a river runs.", "A river runs today."),
        ({"rule": "ends_with", "text": "!"}, "A river runs by!", "A river! It runs by."),
        ({"rule": "contains", "text": "green"}, "A green river runs.", "A greener river runs."),
        ({"rule": "lacks", "text": "the"}, "Then a river runs.", "Then the river runs."),
        ({"rule": "quoted"}, '"A river runs by."', 'A river runs "by."'),
    ],
)
def test_each_rule_can_be_kept_and_broken(rule, kept, broken):
    reference = json.dumps({"topic": "rivers", "rules": [rule, {"rule": "lacks", "text": "no"}]})
    oracle, both = load("chat", "oracle"), ([[]] * 2, [kept, broken], [reference] * 2)
    scores = oracle.score(*both)
    assert [score["score"] for score in scores] == [1.0, 0.5]
    assert [score["all_rules"] for score in scores] == [1.0, 0.0]
    assert [result["score"] for result in oracle.every_rule(*both)] == [1.0, 0.0]


@pytest.mark.parametrize("text", ["", "A river runs.", "A brook runs by.", "A river\nruns by."])
def test_nothing_off_the_topic_or_the_form_is_rewarded(text):
    reference = json.dumps({"topic": "rivers", "rules": [{"rule": "no_commas"}] * 2})
    assert load("chat", "oracle").score([[]], [text], [reference])[0]["score"] == 0.0


@pytest.mark.parametrize(
    ("text", "whole"),
    [
        ("a quiet river is here.", True),
        ("a quiet river is here", False),
        ("the life of a quiet river.", False),
        ("a quiet river is a quiet, quiet river.", False),
    ],
)
def test_the_second_opinion_counts_rules_in_whole_sentences_only(text, whole):
    rules = [{"rule": "lowercase"}, {"rule": "contains", "text": "green"}]
    reference = json.dumps({"topic": "rivers", "rules": rules})
    oracle = load("chat", "oracle")
    assert [result["score"] for result in oracle.score([[]], [text], [reference])] == [0.5]
    assert oracle.second_opinion([[]], [text], [reference]) == [
        {"score": 0.5 * whole, "whole": float(whole)}
    ]
