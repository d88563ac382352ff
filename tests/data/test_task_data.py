"""Data of the tasks: as generators make them, and as the tasks need them."""

from typing import Any

import pytest

from tests.data.task_files import DATA, load, rows

FILES = [
    *(("hard-sums", name) for name in ("sft.jsonl", "prompts.jsonl", "longer.jsonl")),
    *(("long-answers", name) for name in ("sft.jsonl", "prompts.jsonl")),
    *(("quickstart", name) for name in ("sft.jsonl", "prompts.jsonl")),
    *(("chat", name) for name in ("prompts.jsonl", "other.jsonl", "rare.jsonl")),
]


def asked(row: dict[str, Any]) -> str:
    return str(row["messages"][0]["content"])


def graded(task: str, answers: list[str], references: list[str]) -> list[dict[str, float]]:
    prompts: list[list[dict[str, str]]] = [[] for _ in answers]
    scores: list[dict[str, float]] = load(task, "oracle").score(prompts, answers, references)
    return scores


@pytest.mark.parametrize("task", ["hard-sums", "long-answers", "quickstart", "chat"])
def test_committed_files_are_what_the_generator_makes(task, tmp_path):
    load(task, "make").main(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {n for t, n in FILES if t == task}
    for path in tmp_path.iterdir():
        committed = (DATA / task / path.name).read_bytes()
        assert path.read_bytes() == committed, f"run `python data/{task}/make.py`"


@pytest.mark.parametrize("task", ["hard-sums", "long-answers"])
def test_no_prompt_is_in_the_warm_start(task):
    questions = {asked(row) for row in rows(task, "sft.jsonl")}
    prompts = [asked(row) for t, n in FILES if t == task and n != "sft.jsonl" for row in rows(t, n)]
    assert len(set(prompts)) == len(prompts)
    assert not questions & set(prompts)


def test_few_sums_of_the_warm_start_are_right_and_all_references_are():
    taught = rows("hard-sums", "sft.jsonl")
    two = [row for row in taught if asked(row).count("×") == 2]
    truth = [str(value(asked(row))) for row in two]
    grades = graded("hard-sums", [row["messages"][1]["content"] for row in two], truth)
    share = sum(grade["score"] for grade in grades) / len(grades)
    assert 1 / 24 < share < 1 / 11, "about one in 16"
    assert all(grade["answered"] for grade in grades)
    for row in rows("hard-sums", "prompts.jsonl") + rows("hard-sums", "longer.jsonl"):
        assert row["reference_answer"] == str(value(asked(row)))


def value(question: str) -> int:
    total = 0
    for term in question.removeprefix("Compute ").removesuffix(".").split(" + "):
        factors = [int(word) for word in term.split(" × ")]
        total += factors[0] * (factors[1] if len(factors) > 1 else 1)
    return total


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
    ],
)
def test_an_answer_is_scored(task, answer, reference, score):
    assert graded(task, [answer], [reference])[0]["score"] == pytest.approx(score)
