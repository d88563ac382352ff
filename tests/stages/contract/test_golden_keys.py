"""Keys of requests, written down once: artifacts made before are found as long as they hold.

A key that changes on purpose (another version of a stage, another default, a new field) gets a new
row here and a line in CHANGELOG.md that says what is computed again.
"""

import pytest

from stages.contract.params import StageParams
from stages.contract.request import ArtifactInput, FileInput, HubInput, Input, make_request
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


def made(stage: str, path: str) -> ArtifactInput:
    return ArtifactInput(stage=stage, key="1" * 64, path=path, digest=f"{stage}/{path}")


CHECKPOINT = made("sft", "checkpoint")
RESPONSES = made("generate", "responses.parquet")
SCORES = made("score", "scores.parquet")
PAIRS = made("pair", "pairs.parquet")
SCORED = {"responses": (RESPONSES, RESPONSES), "scores": (SCORES, SCORES)}

GOLDEN: list[tuple[StageParams, dict[str, tuple[Input, ...]], str]] = [
    (
        PrepareParams(),
        {"train": (FILE,)},
        "6b078cc77f99d17d9ebb564d96dea5592083527441843c01ae12a131d2716639",
    ),
    (
        PrepareParams(iterations=2),
        {"train": (HUB, HUB), "test": (FILE,)},
        "dd98512c2bcb5eaa939790dbc59068ab8d3bc6969be856bc79bbad58d495507a",
    ),
    (
        ScreenParams(num_samples=2),
        {"prompts": (made("prepare", "test.parquet"),), **SCORED},
        "3ec687faaeb9b5ff450771417d390f9b359a6eddb95f605b489d34a6c3527d93",
    ),
    (
        GenerateParams(),
        {"policy": (CHECKPOINT,), "prompts": (made("prepare", "iteration-1.parquet"),)},
        "85e21eac0fa7eeb54c2b92cfa51883ac5313884ecf6dd89ee3e12335f757550e",
    ),
    (
        GenerateParams(backend="vllm", num_samples=8, num_shards=2, shard_index=1),
        {"policy": (HUB_MODEL,), "prompts": (made("prepare", "test.parquet"),)},
        "f1cdcf28cc38404e055e3e9efb8bf80cc687ad00a5d078bb47689d6599c25f67",
    ),
    (
        ScoreParams(oracle="python"),
        {"responses": (RESPONSES,), "code": (FILE,)},
        "6dc5d95724a1b527bca221ee928f7af6dc666f89239968dadad18cc207cd8b8a",
    ),
    (
        ScoreParams.model_validate(
            {"oracle": "judge", "judge": {"model": "m", "url": "http://u", "mode": "pairwise"}}
        ),
        {"responses": (RESPONSES,), "opponents": (RESPONSES,)},
        "755544f6259487fd56cb0bf2ccbbaf9b549e147a76d7f52f4d9ca539e247c20a",
    ),
    (PairParams(), SCORED, "625fc561fb12e0504a13a189bd0aaf8a961f6cb4cefe8722bb8c77b4c47aaacc"),
    (
        PairParams(strategy="random", ties="keep"),
        SCORED,
        "ad18e8b2992cc84c75aeb43416dc80c9344efb81e801d3bb25de45db452cbdd9",
    ),
    (
        TrainParams(),
        {"policy": (CHECKPOINT,), "reference": (CHECKPOINT,), "pairs": (PAIRS, PAIRS)},
        "46f66f30abb4d81f71c42d784b8b22e1478fcb5fa16028e2c20bb5a6804e59e0",
    ),
    (
        TrainParams(divergence=0.5, design="arctanh", reference="ema", iteration=2),
        {"policy": (CHECKPOINT,), "reference": (made("train", "ema"),), "pairs": (PAIRS,)},
        "4696687ce85ba64ba43b0b55eace6b1b04c311098899f36f52ad0a12c116efa0",
    ),
    (
        TrainParams.model_validate({"objective": "python", "python": {"settings": {"beta": 1}}}),
        {
            "policy": (CHECKPOINT,),
            "reference": (CHECKPOINT,),
            "pairs": (PAIRS,),
            "code": (FILE,),
        },
        "14608c6a7e9e2e9f7db07a294aaa8d3631b3a0270435c7f1c54d803fef61775a",
    ),
    (
        PreferencesParams(),
        {
            "data": (HUB,),
            "prompts": (made("prepare", "iteration-1.parquet"),),
            "policy": (CHECKPOINT,),
        },
        "2141ef3c433000e7dcf179f0b2614d4c786d5ca241f61bbf8fa30f261089ec4d",
    ),
    (
        EvaluateParams(),
        {
            **SCORED,
            "base_responses": (RESPONSES,),
            "base_scores": (SCORES,),
            "reference": (CHECKPOINT,),
        },
        "ca574b7afc857cae25fe013cd8fd93c664869595c07f5f51ab5eb0b892550400",
    ),
    (
        PromoteParams(model_name="model", better_than_base_confidence=None),
        {"checkpoint": (CHECKPOINT,), "metrics": (made("evaluate", "metrics.json"),)},
        "4aa746becfc36a49bbd1849a6025a47dda47290f0c7d250bf4b535d69ac5695d",
    ),
]


@pytest.mark.parametrize(
    ("params", "inputs", "key"),
    GOLDEN,
    ids=[f"{params.stage}-{key[:6]}" for params, _, key in GOLDEN],
)
def test_a_request_has_the_key_that_it_always_had(
    params: StageParams, inputs: dict[str, tuple[Input, ...]], key: str
) -> None:
    assert make_request(params, inputs=inputs, seed=7, store="store").key == key
