import pytest

from stages.score.math_answers import MathVerify
from tests.stage_calls import response, score_params

# Reference, response, grade.
TABLE = [
    # Boxed, plain and announced answers.
    ("42", r"So the answer is \boxed{42}.", "correct"),
    ("42", "We get 6 · 7, so it is 42", "correct"),
    ("42", r"Surely 42? No: \boxed{43}", "wrong"),
    ("42", r"\boxed{42}, and I checked that 41 and 43 do not work", "correct"),
    ("42", "Final answer: 42. I checked 41 as well.", "correct"),
    (r"\boxed{42}", "42", "correct"),
    # The same number in another dress.
    ("1/2", r"\boxed{0.5}", "correct"),
    ("1,234", r"\boxed{1234}", "correct"),
    (r"50\%", r"\boxed{0.5}", "correct"),
    (r"\pi", r"\boxed{3.14}", "wrong"),
    ("10", r"\boxed{10\text{ cm}}", "correct"),
    # Expressions, sets, pairs, words.
    ("x^2+2x+1", "$(x+1)^2$", "correct"),
    (r"\{1,2\}", r"\boxed{\{2,1\}}", "correct"),
    ("(1,2)", r"\boxed{(2,1)}", "wrong"),
    ("C", r"\boxed{\text{(C)}}", "correct"),
    # Malformed LaTeX, and nothing at all.
    (r"\frac{1}{2}", r"\boxed{\frac{1{2}}", "wrong"),
    (r"\frac{1}{2}", r"\boxed{\frac{1}{2}", "correct"),
    ("42", r"\boxed{\begin{", "no answer"),
    ("42", "I do not know.", "no answer"),
    ("", r"\boxed{42}", "unreadable reference"),
]
# One operation of Python's integers that outlives any patience.
ENDLESS = r"\boxed{9^{9^{9^{9}}}+1}"


@pytest.fixture
def patient(monkeypatch):
    """Gives each answer as much time as a busy machine may need, in two processes at most."""
    monkeypatch.setattr("stages.score.math_answers.ANSWER_SECONDS", 60.0)
    monkeypatch.setattr("stages.score.math_answers._MOST_PROCESSES", 2)


def graded(rows):
    """Verdicts on pairs of reference and response, in order."""
    pairs = [{"reference_answer": right, "response": answer} for right, answer in rows]
    verdicts = dict(MathVerify().score(pairs))
    return [verdicts[place] for place in range(len(rows))]


def test_grades_of_tricky_answers(patient):
    verdicts = graded([row[:2] for row in TABLE])
    expected = {"correct": (1.0, 1.0), "wrong": (0.0, 1.0), "no answer": (0.0, 0.0)}
    for row, verdict in zip(TABLE, verdicts, strict=True):
        outcome = (verdict.score, verdict.components.get("answered"))
        assert outcome == expected.get(row[2], (None, None)), row


@pytest.mark.slow
def test_what_takes_too_long_is_given_up_and_the_rest_is_graded(monkeypatch):
    monkeypatch.setattr("stages.score.math_answers.ANSWER_SECONDS", 10.0)
    monkeypatch.setattr("stages.score.math_answers._MOST_PROCESSES", 1)
    pairs = [("1", r"\boxed{1}"), ("1", ENDLESS), ("2", r"\boxed{2}")]
    verdicts = graded(pairs)
    assert [verdict.score for verdict in verdicts] == [1.0, None, 1.0]
    assert verdicts[1].error == "the answer took more than 10 s"


@pytest.fixture
def score(score_rows, patient):
    def run(rows, **params):
        return score_rows(score_params("math_verify", **params), rows)

    return run


ROWS = [
    response("6 · 7 ?", 0, r"\boxed{42}", reference_answer="42"),
    response("6 · 7 ?", 1, r"\boxed{41}", reference_answer="42"),
    response("6 · 7 ?", 2, "Who knows.", reference_answer="42"),
]


def test_a_missing_reference_gives_no_score(score):
    unanswered = [
        response("6 · 8 ?", 0, "48", reference_answer=None),
        response("6 · 9 ?", 0, "54", reference_answer=""),
    ]
    rows = score([*ROWS, *unanswered], max_null_share=0.4)
    assert [row["score"] for row in rows] == [1.0, 0.0, 0.0, None, None]
    assert [row["error"] for row in rows[3:]] == [
        "the prompt has no reference answer",
        "the reference answer '' cannot be read",
    ]
