"""Keys of requests, written down once: artifacts made before are found as long as they hold.

A key that changes on purpose (another version of a stage, another default, a new field) gets a new
row here and a line in CHANGELOG.md that says what is computed again.
"""

import pytest

from stages.bandit.params import BanditParams
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
        "715254100792e13204567db7d2b12d4fedf0c06eb1312604885179f3d5873059",
    ),
    (
        PrepareParams(iterations=2),
        {"train": (HUB, HUB), "test": (FILE,)},
        "f46918556ed1ced91d85ff00033303ccd182e86dafecb1479b7788679e813e8c",
    ),
    (
        ScreenParams(num_samples=2),
        {"prompts": (made("prepare", "test.parquet"),), **SCORED},
        "c9b6e957338873cc1dfcb268c2fff720805659e1289c4f9846de72fd7e22eb2d",
    ),
    (
        GenerateParams(),
        {"policy": (CHECKPOINT,), "prompts": (made("prepare", "iteration-1.parquet"),)},
        "df40fb3e7447bf8f79f13772a9f60d45f5bf545330d3da970f276d892348f0b2",
    ),
    (
        GenerateParams(backend="vllm", num_samples=8, num_shards=2, shard_index=1),
        {"policy": (HUB_MODEL,), "prompts": (made("prepare", "test.parquet"),)},
        "b7ac464e54c2a3510e5238f8ee00c08a615efa685440bdc9b7006bfefef5156b",
    ),
    (
        ScoreParams(oracle="python"),
        {"responses": (RESPONSES,), "code": (FILE,)},
        "7ccbe1fa2ae8817002f3eca0570271c11415ed2074bc9b1c948090cf5be02b86",
    ),
    (
        ScoreParams.model_validate(
            {"oracle": "judge", "judge": {"model": "m", "url": "http://u", "mode": "pairwise"}}
        ),
        {"responses": (RESPONSES,), "opponents": (RESPONSES,)},
        "96f8681eb7092d37f89b3ba5127638df8b1d3b68166cb2bbb4d8f8e956ed5441",
    ),
    (PairParams(), SCORED, "81adb7f0e30f0f85478897e76d371810395998d877dec10305f7469894ae0782"),
    (
        PairParams(strategy="random", ties="keep"),
        SCORED,
        "8c049050b471c37eaee2e00bfc5e59f97ba9836b96aeac25a1d35d8987168d5f",
    ),
    (
        TrainParams(),
        {"policy": (CHECKPOINT,), "reference": (CHECKPOINT,), "pairs": (PAIRS, PAIRS)},
        "52e22e4d17770cee3653bfe4663487152fadb468d1d2283b23d5627356350a1e",
    ),
    (
        TrainParams(divergence=0.5, design="arctanh", reference="ema", iteration=2),
        {"policy": (CHECKPOINT,), "reference": (made("train", "ema"),), "pairs": (PAIRS,)},
        "384e127a2e51785307ac8edb19b1c013285623009dcdfbc891a2f2760b1f5898",
    ),
    (
        TrainParams.model_validate({"objective": "python", "python": {"settings": {"beta": 1}}}),
        {
            "policy": (CHECKPOINT,),
            "reference": (CHECKPOINT,),
            "pairs": (PAIRS,),
            "code": (FILE,),
        },
        "398d0ee63da69bd39cb12a5f2dbe212bd7de045f820d14fbccfea2c77a0f0fa1",
    ),
    (
        PreferencesParams(),
        {
            "data": (HUB,),
            "prompts": (made("prepare", "iteration-1.parquet"),),
            "policy": (CHECKPOINT,),
        },
        "ab5dcab5cab7d18701bb3489ee6815abbcb7f382ae56e0b94e965c9bdf284210",
    ),
    (
        EvaluateParams(),
        {
            **SCORED,
            "base_responses": (RESPONSES,),
            "base_scores": (SCORES,),
            "reference": (CHECKPOINT,),
        },
        "7491b1e0b1eeae806c3e07b8131909b6fb205f2c7e0cb800644efc425ec8e7f9",
    ),
    (
        PromoteParams(model_name="model", better_than_base_confidence=None),
        {"checkpoint": (CHECKPOINT,), "metrics": (made("evaluate", "metrics.json"),)},
        "eb031309a767ca33e71ace56a0f3ad1c004506c87d4c935dd0022dd3604e8e9a",
    ),
    (BanditParams(), {}, "ae31d9ee6c6084f3b00a8e3231febfe7515e3a4e521009fe4b14319af097d876"),
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
