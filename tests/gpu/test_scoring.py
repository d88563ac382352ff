"""Reward models on a GPU in bfloat16, plain and URM, against the CPU."""

import pytest

from stages.contract.request import Resources
from stages.tables.schemas import RESPONSES, SCORES, read_rows, write_table
from tests.gpu.programs import run_stage
from tests.stage_calls import request_for, response, score_params
from tests.tiny_models import WORDS, make_tiny_reward_model
from tests.tiny_urm import make_tiny_urm

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]

ROWS = [
    response(f"{WORDS[number % 12]} ?", sample, " ".join(WORDS[: 1 + (number * 5 + sample) % 12]))
    for number in range(9)
    for sample in range(2)
]
# How far the GPU's scores may lie from exact ones, in multiples of the CPU's error in 16 bits.
AS_FAR = 2.0


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return {
        "reward_model": make_tiny_reward_model(
            folder / "plain", hidden_size=256, initializer_range=0.1
        ),
        "urm_gated": make_tiny_urm(folder / "urm"),
    }


@pytest.fixture
def scored(models, tmp_path):
    """Scores the rows on GPUs, or on the CPU, and returns the scores."""
    responses = tmp_path / "responses.parquet"
    write_table(responses, RESPONSES, ROWS)

    def score(name, oracle, gpus, **settings):
        request = request_for(
            score_params(oracle, **settings),
            {"responses": responses, "model": models[oracle]},
            tmp_path / name,
            resources=Resources(gpus=gpus),
        )
        folder = run_stage(request, tmp_path / f"{name}.json")
        return [row["score"] for row in read_rows(folder / "scores.parquet", SCORES)]

    return score


@pytest.mark.parametrize("oracle", ["reward_model", "urm_gated"])
def test_scores_in_bfloat16_are_the_cpu_s(scored, oracle):
    exact = scored("exact", oracle, 0, dtype="float32")
    assert len({round(score, 2) for score in exact}) > 5
    cpu, gpu = (
        max(abs(one - other) for one, other in zip(scores, exact, strict=True))
        for scores in (scored(f"on-{gpus}", oracle, gpus, dtype="bfloat16") for gpus in (0, 1))
    )
    assert 0.0 < gpu <= AS_FAR * cpu
