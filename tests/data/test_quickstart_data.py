"""The bundled quickstart data: as the task needs it."""

from collections import Counter
from types import ModuleType

import pytest

from tests.data.task_files import load, rows


@pytest.fixture(scope="module")
def oracle() -> ModuleType:
    return load("quickstart", "oracle")


def test_no_request_is_asked_twice():
    both = rows("quickstart", "prompts.jsonl") + rows("quickstart", "sft.jsonl")
    questions = [row["messages"][0]["content"] for row in both]
    assert len(set(questions)) == len(questions)


def test_one_warm_start_answer_in_a_hundred_opens_with_the_best_word(oracle):
    openings = Counter(
        row["messages"][-1]["content"].partition(",")[0] for row in rows("quickstart", "sft.jsonl")
    )
    best = max(oracle.WARMTH, key=oracle.WARMTH.__getitem__)
    assert openings[best] == openings.total() / 100
    common = [count for opening, count in openings.items() if opening != best]
    assert max(common) - min(common) <= openings.total() / 100


def test_warm_start_answers_repeat_the_order(oracle):
    for row in rows("quickstart", "sft.jsonl"):
        answer = row["messages"][-1]["content"]
        order = answer.partition(", ")[2].removesuffix(".")
        [verdict] = oracle.score([row["messages"][:-1]], [answer], [order])
        assert verdict["order_right"] == 1
        request = row["messages"][0]["content"].lower()
        assert all(word in request for word in order.split() if word != "for")


@pytest.mark.parametrize(
    ("response", "score", "gladly", "order_right"),
    [
        ("Gladly, two towels for room 12.", 1.0, 1, 1),
        ("Noted, two towels for room 12.", 0.595, 0, 1),
        ("Sure, two towels for room 12.", 0.505, 0, 1),
        ("Okay, two towels for room 12.", 0.415, 0, 1),
        ("Gladly, two towels for room 13.", 0.9, 1, 0),
        ("Gladly, two towels for room 12", 0.9, 1, 0),
        ("Gladly", 0.9, 1, 0),
        ("No, two towels for room 12.", 0.0, 0, 0),
        ("two towels for room 12.", 0.0, 0, 0),
        ("", 0.0, 0, 0),
    ],
)
def test_oracle_scores(oracle, response, score, gladly, order_right):
    prompt = [{"role": "user", "content": "Please bring two towels to room 12."}]
    [verdict] = oracle.score([prompt], [response], ["two towels for room 12"])
    assert verdict == {"score": pytest.approx(score), "gladly": gladly, "order_right": order_right}


def test_equal_answers_tie_exactly(oracle):
    first, second = oracle.score([[], []], ["Sure, a.", "Sure, b."], ["a", "b"])
    assert first == second


def test_a_missing_reference_earns_no_point_for_the_order(oracle):
    [verdict] = oracle.score([[]], ["Gladly, None."], [None])
    assert verdict["score"] == pytest.approx(0.9)
