"""The judge that compares, against a scripted server."""

import re

import pytest

from stages.contract.errors import UserError
from stages.tables.schemas import RESPONSES, write_table
from tests.scripted_server import completion
from tests.stage_calls import response, score_params

_SHOWN = re.compile(r"<answer-A>\n(.*)\n</answer-A>\n<answer-B>\n(.*)\n</answer-B>")


def shown(request):
    """The two answers in the order in which the judge sees them."""
    [message] = request["messages"]
    return _SHOWN.search(message["content"]).groups()


def verdict(text):
    return completion(f"Hm.\nVerdict: {text}")


def prefer_longer(number, request):
    first, second = map(len, shown(request))
    return verdict("tie" if first == second else "A" if first > second else "B")


@pytest.fixture
def score(score_rows, tmp_path):
    def run(url, rows, *, against=None, judge=None, template=None, **params):
        inputs = {"code": template}
        if against is not None:
            inputs["opponents"] = tmp_path / "opponents.parquet"
            write_table(inputs["opponents"], RESPONSES, against)
        defaults = {"mode": "pairwise", "url": url, "model": "some-judge", "timeout_seconds": 60.0}
        settings = score_params("judge", **{**defaults, **(judge or {}), **params})
        return score_rows(settings, rows, **inputs)

    return run


def samples(question, *texts):
    return [response(question, sample, text) for sample, text in enumerate(texts)]


def points(rows):
    return [row["score"] for row in rows]


def test_each_pair_is_asked_in_both_orders(serve, score):
    server = serve(prefer_longer)
    rows = score(server.url, samples("q", "long answer", "short"))
    assert points(rows) == [1.0, 0.0]
    assert sorted(map(shown, server.requests)) == [
        ("long answer", "short"),
        ("short", "long answer"),
    ]
    assert rows[0]["oracle"].startswith("judge-pairwise:some-judge@")


def test_scores_are_wins_against_the_next_two_samples(serve, score):
    server = serve(prefer_longer)
    assert points(score(server.url, samples("q", "a", "bbb", "cc", "dddd"))) == [0, 2 / 3, 1 / 3, 1]
    assert len(server.requests) == 2 * 6
    ring = serve(prefer_longer)
    texts = ["a" * length for length in (1, 2, 3, 4, 5)]
    assert points(score(ring.url, samples("r", *texts))) == [0, 1 / 4, 1 / 2, 3 / 4, 1]
    assert len(ring.requests) == 2 * 10


def test_a_template_shows_both_answers(score):
    template = "{{ messages }} {{ response }} {{ second }}"
    with pytest.raises(UserError, match=r"does not show first, .*\n.*oracle_code"):
        score("http://127.0.0.1:9", samples("q", "a", "b"), template=template)


def test_the_same_text_twice_is_a_tie_unasked(serve, score):
    server = serve(prefer_longer)
    rows = [*samples("q", "same", "same"), *samples("r", "long answer", "short")]
    assert points(score(server.url, rows)) == [0.5, 0.5, 1.0, 0.0]
    assert len(server.requests) == 2


@pytest.mark.parametrize("text", ["C", "a", "A.", "A or B", "tie!"])
def test_an_unclear_verdict_leaves_the_prompt_without_scores(serve, score, text):
    def behave(number, request):
        return verdict(text) if "odd" in shown(request)[0] else prefer_longer(number, request)

    rows = [*samples("q", "odd", "even"), *samples("r", "long answer", "short")]
    scores = score(serve(behave).url, rows, max_null_share=0.5)
    assert points(scores) == [None, None, 1.0, 0.0]
    assert f"'Verdict: {text}', not 'Verdict: A'" in scores[0]["error"]


def test_a_refused_comparison_leaves_the_prompt_without_scores(serve, score):
    def behave(number, request):
        if "long" * 100 in str(request):
            return 413, {"message": "too large"}
        is_short = "answer-A" not in str(request)
        return completion("OK") if is_short else prefer_longer(number, request)

    rows = [*samples("q", "long" * 100, "b", "c"), *samples("r", "long answer", "short")]
    scores = score(serve(behave).url, rows, max_null_share=0.6)
    assert points(scores) == [None, None, None, 1.0, 0.0]
    assert "413" in scores[1]["error"]


def test_opponents_are_compared_with_sample_by_sample(serve, score):
    rows = [*samples("q", "long answer", "tiny"), *samples("r", "same", "b")]
    others = [*samples("q", "short", "longer"), *samples("r", "same", "c")]
    server = serve(prefer_longer)
    scores = score(server.url, rows, against=others)
    assert points(scores) == [1.0, 0.0, 0.5, 0.5]
    assert len(server.requests) == 2 * 3


def test_opponents_must_be_of_the_same_prompts(serve, score):
    with pytest.raises(UserError, match="opponents' row for prompt"):
        score(serve(prefer_longer).url, samples("q", "a", "b"), against=samples("r", "a", "b"))


def test_a_baseline_s_answers_replace_the_samples(serve, score):
    answered = {"reference_answer": "middling"}
    rows = [
        response("q", 0, "a long answer", **answered),
        response("q", 1, "short", **answered),
        response("r", 0, "anything"),
    ]
    server = serve(prefer_longer)
    scores = score(server.url, rows, judge={"against": "reference"}, max_null_share=0.5)
    assert points(scores) == [1.0, 0.0, None]
    assert scores[2]["error"] == "the prompt has no reference answer to compare with"
    assert sorted(map(shown, server.requests)) == [
        ("a long answer", "middling"),
        ("middling", "a long answer"),
        ("middling", "short"),
        ("short", "middling"),
    ]
    assert not any("<reference>" in str(request["messages"]) for request in server.requests)
