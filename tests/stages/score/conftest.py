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
def score_rows(tmp_path):
    """Scores a table of responses and returns the rows of the table of scores."""

    def run(settings, rows, **inputs):
        responses = tmp_path / "responses.parquet"
        write_table(responses, RESPONSES, rows)
        request = request_for(settings, {"responses": responses, **inputs}, tmp_path / "store")
        artifact, _ = call_request(STAGE, request)
        return list(read_rows(artifact.path / "scores.parquet", SCORES))

    return run


@pytest.fixture
def score(tmp_path):
    """Runs the stage and returns the rows, the metrics and the events."""

    def run(*, code=None, model=None, rows=None, **params):
        responses = tmp_path / "responses.parquet"
        write_table(responses, RESPONSES, response_rows() if rows is None else rows)
        inputs = {"responses": responses}
        if code is not None:
            inputs["code"] = tmp_path / "oracle.py"
            inputs["code"].write_text(textwrap.dedent(code))
        if model is not None:
            inputs["model"] = model
        params = {"oracle": "python" if model is None else "reward_model", **params}
        request = request_for(score_params(**params), inputs, tmp_path / "store")
        artifact, events = call_request(STAGE, request)
        scores = list(read_rows(artifact.path / "scores.parquet", SCORES))
        return scores, json.loads((artifact.path / "metrics.json").read_text()), events

    return run
