import pytest
from pydantic import ValidationError

from stages.contract.digests import sha256_file
from stages.contract.errors import UserError
from stages.score.params import JudgeSettings
from tests.flows.loop import ROOT
from tests.scripted_server import completion
from tests.stage_calls import response, score_params

ROWS = [
    response("What is 6 · 7?", 0, "It is 42.", reference_answer="42"),
    response("What is 6 · 7?", 1, "It is 41."),
]


@pytest.fixture
def score(score_rows):
    def run(url, rows=ROWS, template=None, **params):
        defaults = {"url": url, "model": "some-judge", "timeout_seconds": 60.0}
        return score_rows(score_params("judge", **{**defaults, **params}), rows, code=template)

    return run


def asked(request):
    [message] = request["messages"]
    return message["content"]


def test_each_response_gets_its_mark(serve, score):
    server = serve(
        lambda number, request: completion(
            "Right.\nScore: 9" if "It is 42." in asked(request) else "Wrong.\n\nScore: 2.5\n"
        )
    )
    rows = score(server.url)
    assert [row["score"] for row in rows] == [9.0, 2.5]
    assert rows[0]["oracle"].startswith("judge:some-judge@")
    assert rows[0]["oracle"].endswith(":1-10")


def test_the_judge_sees_conversation_response_reference_and_marks(serve, score):
    server = serve(lambda number, request: completion("Score: 3"))
    score(server.url, max_tokens=64)
    assert {
        (request["model"], request["temperature"], request["max_tokens"])
        for request in server.requests
    } == {("some-judge", 0, 64)}
    texts = [asked(request) for request in server.requests]
    with_reference = next(text for text in texts if "It is 42." in text)
    without = next(text for text in texts if "It is 41." in text)
    assert "<user>\nWhat is 6 · 7?\n</user>" in with_reference
    assert "a number from 1 (worst) to 10 (best)" in with_reference
    assert "<reference>\n42\n</reference>" in with_reference
    assert "<reference>" not in without


def test_fields_of_a_request_can_be_added_and_taken_out(serve, score):
    server = serve(lambda number, request: completion("Score: 3"))
    score(server.url, extra_body={"temperature": None, "seed": 7})
    assert all("temperature" not in request for request in server.requests)
    assert {(request["seed"], request["max_tokens"]) for request in server.requests} == {(7, 512)}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("Score: 7\nOr maybe 8.", "Or maybe 8."),
        ("Score: 7/10", "Score: 7/10"),
        ("My Score: 7", "My Score: 7"),
        ("Score: 11", "11 is not between"),
        ("Score: -1", "-1 is not between"),
        ("", "''"),
        (None, "''"),
    ],
)
def test_an_answer_without_a_mark_has_no_score(serve, score, text, reason):
    server = serve(lambda number, request: completion(text))
    [row] = score(server.url, ROWS[:1], max_null_share=1)
    assert row["score"] is None
    assert reason in row["error"]


def test_a_template_may_be_the_user_s(serve, score, tmp_path):
    server = serve(lambda number, request: completion("Score: 3"))
    [row] = score(server.url, ROWS[:1], template="{{ response }} Mark it up to {{ highest }}.")
    assert asked(server.requests[0]) == "It is 42. Mark it up to 10."
    assert row["oracle"] == f"judge:some-judge@{sha256_file(tmp_path / 'oracle.py')[:16]}:1-10"


@pytest.mark.parametrize(
    ("template", "what"),
    [
        ("{{ answer }} {{ response }}", "'answer' is undefined"),
        ("def score(prompts, responses, references):", "does not show response"),
        ("{% if %}", "cannot be read"),
        ("für {{ response }}".encode("latin-1"), "cannot be read"),
    ],
)
def test_a_wrong_template_is_refused(score, template, what):
    with pytest.raises(UserError, match=what):
        score("http://127.0.0.1:9", template=template)


def test_the_judge_of_coherence_marks_nonsense_lower(serve, score):
    server = serve(lambda number, request: completion("Nonsense.\nScore: 0"))
    template = (ROOT / "configs/suites/coherence.jinja").read_text()
    rows = score(server.url, template=template, marks=(0, 3))
    assert [row["score"] for row in rows] == [0.0, 0.0]
    assert rows[0]["oracle"].endswith(":0-3")
    texts = [asked(request) for request in server.requests]
    assert all("3: fully coherent" in text for text in texts)
    assert all("0: complete nonsense" in text for text in texts)
    assert all("a number from 0 to 3" in text for text in texts)


@pytest.mark.parametrize("marks", [(3, 0), (5, 5)])
def test_marks_that_no_judge_could_give_are_refused(marks):
    with pytest.raises(ValidationError, match=r"marks.*lowest"):
        JudgeSettings(marks=marks)


def test_an_answer_of_another_kind_is_named(serve, score):
    with pytest.raises(UserError, match="choices: Field required"):
        score(serve(lambda number, request: (200, {"usage": {}})).url, ROWS[:1])


def refuse_long(number, request):
    """A server whose context is short: it answers with a mark what is not too long for it."""
    if len(asked(request)) > 1000:
        return 400, {"message": "maximum context length is 8192 tokens"}
    return completion("Score: 3")


@pytest.mark.parametrize("long_one", [0, 2])
def test_a_refused_question_leaves_its_response_without_score(serve, score, long_one):
    """The refused question is the server's first one, or its last."""
    rows = [response("q", sample, "text") for sample in range(3)]
    rows[long_one] = response("q", long_one, "text" * 1000)
    scores = score(serve(refuse_long).url, rows, max_null_share=0.5, concurrency=1)
    assert [row["score"] for row in scores] == [None if n == long_one else 3.0 for n in range(3)]
    assert "maximum context length" in scores[long_one]["error"]


def test_settings_that_get_every_question_refused_are_named_at_once(serve, score):
    server = serve(lambda number, request: (422, {"message": "max_tokens is too large"}))
    with pytest.raises(UserError, match=r"422: .*max_tokens.*\n.*settings of score\.judge"):
        score(server.url, ROWS * 50, max_null_share=1, concurrency=1)
    assert len(server.requests) == 2
