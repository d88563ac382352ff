"""A weighted sum of several oracles: totals, components, failures, and settings that clash."""

import pytest
from pydantic import ValidationError

from stages.score.remote import RemoteError
from tests.scripted_server import completion
from tests.stage_calls import response, score_params

ROWS = [
    response("What is 6 · 7?", 0, "It is 42.", reference_answer="42"),
    response("What is 6 · 7?", 1, "It is clearly 41.", reference_answer="42"),
    response("What is 1 + 1?", 0, "It is 2.", reference_answer="2"),
    response("What is 1 + 1?", 1, "It is two, I think.", reference_answer="2"),
]
WORDS = """
    def score(prompts, responses, references):
        return [{"score": len(text.split()), "letters": len(text)} for text in responses]
"""
SERVER = {"identity": "tone@1", "timeout_seconds": 60.0}


def tones(request):
    """A reward server's answer: the place of each response among its prompt's."""
    scores = [
        {"score": 10.0 * row["sample_index"], "components": {"warmth": 0.5}}
        for row in request["responses"]
    ]
    return 200, {"oracle": "tone@1", "scores": scores}


@pytest.fixture
def score(score_rows):
    def run(*, code=WORDS, weights, **params):
        settings = score_params("weighted", weights=weights, **params)
        return score_rows(settings, ROWS, code=code)

    return run


def test_scores_are_weighed_and_added(serve, score):
    server = serve(lambda number, request: tones(request))
    rows = score(
        weights={"python": -0.5, "math_verify": 3, "http": 0.25}, http={"url": server.url, **SERVER}
    )
    [identity] = {row["oracle"] for row in rows}
    assert identity.startswith("weighted:-0.5*python:score@")
    assert "+0.25*http:tone@1+3*math_verify:" in identity
    words, right, places = [3, 4, 3, 5], [1, 0, 1, 0], [0, 1, 0, 1]
    assert [row["score"] for row in rows] == [
        pytest.approx(-0.5 * w + 3 * r + 10 * p / 4)
        for w, r, p in zip(words, right, places, strict=True)
    ]
    assert dict(rows[1]["components"]) == {
        "python": 4.0,
        "python.letters": 17.0,
        "math_verify": 0.0,
        "math_verify.answered": 1.0,
        "http": 10.0,
        "http.warmth": 0.5,
    }


def test_a_response_that_one_oracle_cannot_score_has_no_score(serve, score):
    server = serve(lambda number, request: tones(request))
    code = """
        def score(prompts, responses, references):
            return [None if "clearly" in text else 1.0 for text in responses]
    """
    rows = score(
        code=code,
        weights={"python": 1, "http": 1},
        http={"url": server.url, **SERVER},
        max_null_share=0.5,
    )
    assert [row["score"] for row in rows] == [1.0, None, 1.0, 11.0]
    assert "python: " in rows[1]["error"]
    assert "returned None" in rows[1]["error"]
    assert dict(rows[1]["components"]) == {"http": 10.0, "http.warmth": 0.5}


def test_a_judge_beside_a_function_asks_by_its_own_template(serve, score):
    def behave(number, request):
        [message] = request["messages"]
        assert "def score" not in message["content"]
        return completion("Fine.\nScore: 9")

    server = serve(behave)
    judge = {"url": server.url, "model": "some-judge"}
    rows = score(weights={"python": 1, "judge": 1}, judge=judge)
    assert [row["score"] for row in rows] == [12.0, 13.0, 12.0, 14.0]


def test_what_a_server_said_before_it_failed_is_not_asked_again(serve, score):
    """Whatever the order in the settings, a server is asked last, and its answers are kept."""
    failing = [True]

    def behave(number, request):
        if failing[0] and request["responses"][0]["prompt_id"] == ROWS[2]["prompt_id"]:
            return 503, "busy"
        return tones(request)

    server = serve(behave)
    http = {"url": server.url, **SERVER, "rows_per_request": 2, "concurrency": 1}
    with pytest.raises(RemoteError):
        score(weights={"http": 1, "python": 1}, http=http)
    failing[0] = False
    server.requests.clear()
    rows = score(weights={"python": 1, "http": 1}, http=http)
    assert [row["score"] for row in rows] == [3.0, 14.0, 3.0, 15.0]
    assert [row["prompt_id"] for request in server.requests for row in request["responses"]] == [
        row["prompt_id"] for row in ROWS[2:]
    ]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, r"needs weighted\.weights"),
        ({"weights": {"weighted": 1}}, r"weights\.weighted"),
        ({"weights": {"python": float("nan")}}, "finite"),
        ({"weights": {"http": 1}}, r"http\.url"),
        (
            {"weights": {"urm_gated": 1, "reward_model": 1}},
            "urm_gated and reward_model, which both need the input `model`",
        ),
    ],
)
def test_sums_that_cannot_be_computed_are_refused(settings, message):
    with pytest.raises(ValidationError, match=message):
        score_params("weighted", **{"weights": {}, **settings})
