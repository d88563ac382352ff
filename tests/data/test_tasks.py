"""The tasks in the folder `data`: their files are their generators', their oracles score right."""

import json
import runpy
from pathlib import Path

import pytest

DATA = Path(__file__).parents[2] / "data"
FILES = {
    "hard-sums": {"sft.jsonl", "prompts.jsonl", "longer.jsonl"},
    "long-answers": {"sft.jsonl", "prompts.jsonl"},
    "quickstart": {"sft.jsonl", "prompts.jsonl"},
    "chat": {"prompts.jsonl", "other.jsonl", "rare.jsonl"},
}
ORDER = "two towels for room 12"


def program(task, name):
    """Functions of a task's program."""
    return runpy.run_path(str(DATA / task / f"{name}.py"))


@pytest.mark.parametrize("task", FILES)
def test_committed_files_are_what_the_generator_makes(task, tmp_path):
    program(task, "make")["main"](tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == FILES[task]
    for path in tmp_path.iterdir():
        committed = (DATA / task / path.name).read_bytes()
        assert path.read_bytes() == committed, f"run `python data/{task}/make.py`"


@pytest.mark.parametrize(
    ("task", "answer", "reference", "score"),
    [
        ("hard-sums", "2 × 3 = 6, 6 + 4 = 10. Answer 10.", "10", 1.0),
        ("hard-sums", "2 × 3 = 5, 5 + 4 = 9. Answer 9.", "10", 0.0),
        ("hard-sums", "2 × 3 = 10", "10", 0.0),
        ("long-answers", "Gladly, we bring teas. Noted, we send cups.", "teas cups", 0.7975),
        ("long-answers", "Gladly, we bring cups. Noted, we send cups.", "teas cups", 0.7475),
        ("long-answers", "Gladly, we bring teas.", "teas cups", 0.5),
        ("long-answers", "Gladly, we bring teas. Gladly, we bring teas.", "teas", 1.0),
        ("long-answers", "", "teas cups", 0.0),
        ("quickstart", "Gladly, two towels for room 12.", ORDER, 1.0),
        ("quickstart", "Noted, two towels for room 12.", ORDER, 0.595),
        ("quickstart", "Okay, two towels for room 12.", ORDER, 0.415),
        ("quickstart", "Gladly, two towels for room 13.", ORDER, 0.9),
        ("quickstart", "Gladly", ORDER, 0.9),
        ("quickstart", "Gladly, None.", None, 0.9),
        ("quickstart", "No, two towels for room 12.", ORDER, 0.0),
        ("quickstart", "", ORDER, 0.0),
    ],
)
def test_an_answer_is_scored(task, answer, reference, score):
    [verdict] = program(task, "oracle")["score"]([[]], [answer], [reference])
    assert verdict["score"] == pytest.approx(score)


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
def test_each_rule_of_the_chat_can_be_kept_and_broken(rule, kept, broken):
    reference = json.dumps({"topic": "rivers", "rules": [rule, {"rule": "lacks", "text": "no"}]})
    oracle, both = program("chat", "oracle"), ([[]] * 2, [kept, broken], [reference] * 2)
    scores = oracle["score"](*both)
    assert [score["score"] for score in scores] == [1.0, 0.5]
    assert [score["all_rules"] for score in scores] == [1.0, 0.0]
    assert [result["score"] for result in oracle["every_rule"](*both)] == [1.0, 0.0]


@pytest.mark.parametrize("text", ["", "A river runs.", "A brook runs by.", "A river\nruns by."])
def test_nothing_off_the_topic_or_the_form_is_rewarded(text):
    reference = json.dumps({"topic": "rivers", "rules": [{"rule": "no_commas"}] * 2})
    assert program("chat", "oracle")["score"]([[]], [text], [reference])[0]["score"] == 0.0


@pytest.mark.parametrize(
    ("text", "whole"), [("a quiet river is here.", 1.0), ("the life of a quiet river.", 0.0)]
)
def test_the_second_opinion_counts_rules_in_whole_sentences_only(text, whole):
    rules = [{"rule": "lowercase"}, {"rule": "contains", "text": "green"}]
    reference = json.dumps({"topic": "rivers", "rules": rules})
    [opinion] = program("chat", "oracle")["second_opinion"]([[]], [text], [reference])
    assert opinion == {"score": 0.5 * whole, "whole": whole}
