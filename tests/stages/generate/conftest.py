"""A tiny policy, and a run of the generate stage."""

import json

import pytest

from stages.generate.params import GenerateParams
from stages.generate.run import STAGE
from stages.tables.schemas import RESPONSES, read_rows
from tests.stage_calls import call_request, request_for, write_prompts
from tests.stages.generate.small_runs import PARAMS, TEXTS
from tests.tiny_models import make_tiny_llama


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return make_tiny_llama(tmp_path_factory.mktemp("policy") / "model")


@pytest.fixture
def generate(policy, tmp_path):
    """Runs the stage on texts and returns the rows, the metrics and the events."""

    def run(texts=TEXTS, *, model=None, seed=0, store="store", **params):
        prompts = write_prompts(tmp_path / "prompts.parquet", texts)
        inputs = {"policy": model or policy, "prompts": prompts}
        settings = GenerateParams(**{**PARAMS, **params})
        request = request_for(settings, inputs, tmp_path / store, seed=seed)
        artifact, events = call_request(STAGE, request)
        rows = list(read_rows(artifact.path / "responses.parquet", RESPONSES))
        return rows, json.loads((artifact.path / "metrics.json").read_text()), events

    return run
