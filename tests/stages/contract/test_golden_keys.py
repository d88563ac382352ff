"""Keys of requests, written down once: artifacts made before are found as long as they hold.

The first 16 of 64 digits stand here. A key that changes on purpose (another version of a stage,
another default, a new field) gets a new row and a line in CHANGELOG.md that says what is computed
again.
"""

import pytest

from stages.contract.request import ArtifactInput, FileInput, HubInput, make_request
from stages.evaluate.params import EvaluateParams
from stages.generate.params import GenerateParams
from stages.pair.params import PairParams
from stages.preferences.params import PreferencesParams
from stages.prepare.params import PrepareParams
from stages.promote.params import PromoteParams
from stages.score.params import ScoreParams
from stages.screen.params import ScreenParams
from stages.train.params import TrainParams

FILE = FileInput(location="/data/prompts.jsonl", digest="f" * 64)
HUB = HubInput(repo="owner/prompts", revision="0" * 40, repo_type="dataset")
HUB_MODEL = HubInput(repo="owner/model", revision="0" * 40)


def made(stage, path):
    return ArtifactInput(stage=stage, key="1" * 64, path=path, digest=f"{stage}/{path}")


CHECKPOINT = made("sft", "checkpoint")
RESPONSES = made("generate", "responses.parquet")
SCORES = made("score", "scores.parquet")
PAIRS = made("pair", "pairs.parquet")
SCORED = {"responses": (RESPONSES, RESPONSES), "scores": (SCORES, SCORES)}

GOLDEN = [
    (PrepareParams(), {"train": (FILE,)}, "b57a4ba23fea69ac"),
    (PrepareParams(iterations=2), {"train": (HUB, HUB), "test": (FILE,)}, "8a4858945d87bfc1"),
    (
        ScreenParams(num_samples=2),
        {"prompts": (made("prepare", "test.parquet"),), **SCORED},
        "9f41503d55ecb639",
    ),
    (
        GenerateParams(),
        {"policy": (CHECKPOINT,), "prompts": (made("prepare", "iteration-1.parquet"),)},
        "c8ca0638f203ab76",
    ),
    (
        GenerateParams(backend="vllm", num_samples=8, num_shards=2, shard_index=1),
        {"policy": (HUB_MODEL,), "prompts": (made("prepare", "test.parquet"),)},
        "2965ba8ab185a48a",
    ),
    (
        ScoreParams(oracle="python"),
        {"responses": (RESPONSES,), "code": (FILE,)},
        "6dc5d95724a1b527",
    ),
    (
        ScoreParams.model_validate(
            {"oracle": "judge", "judge": {"model": "m", "url": "http://u", "mode": "pairwise"}}
        ),
        {"responses": (RESPONSES,), "opponents": (RESPONSES,)},
        "c6f9531f3c119bc2",
    ),
    (PairParams(), SCORED, "4b7cb46f1f47ebbc"),
    (PairParams(strategy="best_random", ties="keep"), SCORED, "c6cdd4dcd2ebc728"),
    (
        TrainParams(),
        {"policy": (CHECKPOINT,), "reference": (CHECKPOINT,), "pairs": (PAIRS, PAIRS)},
        "c45a0d231d681491",
    ),
    (
        TrainParams(divergence=0.5, design="arctanh", reference="initial"),
        {"policy": (CHECKPOINT,), "reference": (CHECKPOINT,), "pairs": (PAIRS,)},
        "17e14cbc631e0db5",
    ),
    (
        TrainParams.model_validate({"objective": "python", "python": {"settings": {"beta": 1}}}),
        {"policy": (CHECKPOINT,), "reference": (CHECKPOINT,), "pairs": (PAIRS,), "code": (FILE,)},
        "9c28c91179ac6317",
    ),
    (
        PreferencesParams(),
        {
            "data": (HUB,),
            "prompts": (made("prepare", "iteration-1.parquet"),),
            "policy": (CHECKPOINT,),
        },
        "cb75ce915b914ace",
    ),
    (
        EvaluateParams(),
        {
            **SCORED,
            "base_responses": (RESPONSES,),
            "base_scores": (SCORES,),
            "reference": (CHECKPOINT,),
        },
        "608a4fd24d8194cf",
    ),
    (
        PromoteParams(model_name="model", better_than_base_confidence=None),
        {"checkpoint": (CHECKPOINT,), "metrics": (made("evaluate", "metrics.json"),)},
        "18d97257628abb41",
    ),
]


@pytest.mark.parametrize(
    ("params", "inputs", "key"),
    GOLDEN,
    ids=[f"{params.stage}-{key[:6]}" for params, _, key in GOLDEN],
)
def test_a_request_has_the_key_that_it_always_had(params, inputs, key):
    assert make_request(params, inputs=inputs, seed=7, store="store").key[:16] == key
