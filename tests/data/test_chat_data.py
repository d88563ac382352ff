"""The chat task: its oracle judges as it says."""

import json

import pytest

from tests.data.task_files import load, rows


def test_rules_of_the_two_files_differ() -> None:
    def rules(name: str) -> set[str]:
        found = rows("chat", name)
        assert len({row["prompt"] for row in found}) == len(found)
        asked = [json.loads(row["reference_answer"])["rules"] for row in found]
        return {json.dumps(rule) for pair in asked for rule in pair}

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
def test_each_rule_is_told_kept_and_broken(rule: dict, kept: str, broken: str) -> None:
    asked = json.dumps({"topic": "rivers", "rules": [rule, {"rule": "lacks", "text": "no"}]})
    oracle, both = load("chat", "oracle"), ([[]] * 2, [kept, broken], [asked] * 2)
    found = oracle.score(*both)
    assert [each["score"] for each in found] == [1.0, 0.5]
    assert [each["all_rules"] for each in found] == [1.0, 0.0]
    assert [result["score"] for result in oracle.every_rule(*both)] == [1.0, 0.0]


@pytest.mark.parametrize("text", ["", "A river runs.", "A brook runs by.", "A river\nruns by."])
def test_nothing_off_the_topic_or_the_form_is_rewarded(text: str) -> None:
    asked = json.dumps({"topic": "rivers", "rules": [{"rule": "no_commas"}] * 2})
    assert load("chat", "oracle").score([[]], [text], [asked])[0]["score"] == 0.0


@pytest.mark.parametrize(
    ("text", "whole"),
    [
        ("a quiet river is here.", True),
        ("a quiet river is here", False),
        ("the life of a quiet river.", False),
        ("a quiet river is a quiet, quiet river.", False),
    ],
)
def test_the_second_opinion_counts_rules_in_whole_sentences_only(text: str, whole: bool) -> None:
    rules = [{"rule": "lowercase"}, {"rule": "contains", "text": "green"}]
    asked = json.dumps({"topic": "rivers", "rules": rules})
    oracle = load("chat", "oracle")
    assert [result["score"] for result in oracle.score([[]], [text], [asked])] == [0.5]
    assert oracle.second_opinion([[]], [text], [asked]) == [
        {"score": 0.5 * whole, "whole": float(whole)}
    ]
