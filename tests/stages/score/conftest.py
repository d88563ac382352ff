"""A run of the scoring stage."""

import json
import textwrap

import pytest

from stages.score.run import STAGE
from stages.tables.schemas import RESPONSES, SCORES, read_rows, write_table
from tests.stage_calls import call_request, request_for, score_params
from tests.stages.score.responses import response_rows


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    """Sends a request that failed again at once."""
    monkeypatch.setattr("stages.score.remote.WAIT_SECONDS", 0.0)


@pytest.fixture
def scored(tmp_path):
    """Scores a table of responses and returns the rows of scores, the metrics and the events.

    Code is a text or bytes; any other input is a path.
    """

    def run(settings, rows, *, code=None, **inputs):
        inputs["responses"] = tmp_path / "responses.parquet"
        write_table(inputs["responses"], RESPONSES, rows)
        if code is not None:
            inputs["code"] = tmp_path / "oracle.py"
            inputs["code"].write_bytes(
                code if isinstance(code, bytes) else textwrap.dedent(code).encode()
            )
        artifact, events = call_request(STAGE, request_for(settings, inputs, tmp_path / "store"))
        scores = list(read_rows(artifact.path / "scores.parquet", SCORES))
        return scores, json.loads((artifact.path / "metrics.json").read_text()), events

    return run


@pytest.fixture
def score_rows(scored):
    """Scores a table of responses and returns the rows of the table of scores."""
    return lambda *arguments, **inputs: scored(*arguments, **inputs)[0]


@pytest.fixture
def score(scored):
    """Scores by a function's code or by a reward model; returns what ``scored`` does."""

    def run(*, code=None, model=None, rows=None, **params):
        oracle = "python" if model is None else "reward_model"
        given = {"code": code} if model is None else {"model": model}
        rows = response_rows() if rows is None else rows
        return scored(score_params(oracle, **params), rows, **given)

    return run
