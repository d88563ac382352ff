"""The reward model on vLLM's pooling runner, in the environment that ``make setup-vllm`` makes."""

from __future__ import annotations

import importlib.util

import pytest

from stages.contract.errors import UserError
from stages.contract.tables import RESPONSES, SCORES, read_rows, write_table
from stages.score.run import STAGE
from tests.stage_calls import call_request, request_for, response, score_params
from tests.tiny_models import WORDS, make_tiny_reward_model
from tests.vllm_session import vllm_session

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

# Float32 sums in another order.
ROUNDING = 1e-5
PARAMS = {"oracle": "reward_model", "dtype": "float32", "kv_cache_gib": 0.25}
ROWS = [
    response(f"{WORDS[number % 12]} ?", sample, " ".join(WORDS[: 1 + (number * 5 + sample) % 12]))
    for number in range(9)
    for sample in range(2)
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("pooling")


@pytest.fixture(scope="module")
def session(folder):
    with vllm_session(folder) as session:
        yield session


@pytest.fixture(scope="module")
def model(folder):
    return make_tiny_reward_model(folder / "model", hidden_size=128, initializer_range=0.1)


@pytest.fixture
def request_of(tmp_path, model):
    def make(rows=ROWS, other=None, **params):
        responses = tmp_path / "responses.parquet"
        write_table(responses, RESPONSES, rows)
        inputs = {"responses": responses, "model": other or model}
        return request_for(score_params(**PARAMS | params), inputs, tmp_path / "store")

    return make


def scores_of(folder):
    return [row["score"] for row in read_rows(folder / "scores.parquet", SCORES)]


def test_scores_are_those_of_transformers(session, request_of, tmp_path):
    request = request_of(engine="vllm")
    ours = scores_of(session.finish(request, tmp_path / "request.json"))
    theirs = scores_of(call_request(STAGE, request_of())[0].path)
    assert len({round(each, 3) for each in theirs}) > 5
    assert ours == pytest.approx(theirs, abs=ROUNDING)


def test_what_is_too_long_has_no_score(session, request_of, tmp_path):
    request = request_of(engine="vllm", max_length_tokens=10, max_null_share=1)
    scores = scores_of(session.finish(request, tmp_path / "request.json"))
    assert None in scores
    assert any(score is not None for score in scores)


def test_several_outputs_are_refused(session, request_of, tmp_path):
    ten = make_tiny_reward_model(tmp_path / "ten", hidden_size=128, num_labels=10)
    request = request_of(engine="vllm", other=ten)
    code, events = session.execute(request, tmp_path / "request.json")
    assert code == 64
    assert "has 10 outputs, not one" in events[-1]["message"]


def test_an_interpreter_without_vllm_says_so(request_of, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="needs vLLM"):
        call_request(STAGE, request_of(engine="vllm"))
