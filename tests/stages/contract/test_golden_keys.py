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
        "afc74e6968058f6ee30cd06c02351a8e99e30a58cde8728356790619608861d3",
    ),
    (
        PrepareParams(iterations=2),
        {"train": (HUB, HUB), "test": (FILE,)},
        "decdeacf36d77f2ec0aa337f4bd2f374fb4ac7881536a778c5e22514dd602973",
    ),
    (
        ScreenParams(num_samples=2),
        {"prompts": (made("prepare", "test.parquet"),), **SCORED},
        "9f41503d55ecb63939fb60ff99ea9f107f09eed27d41037536161c6d9356ebaf",
    ),
    (
        GenerateParams(),
        {"policy": (CHECKPOINT,), "prompts": (made("prepare", "iteration-1.parquet"),)},
        "85e21eac0fa7eeb54c2b92cfa51883ac5313884ecf6dd89ee3e12335f757550e",
    ),
    (
        GenerateParams(backend="vllm", num_samples=8, num_shards=2, shard_index=1),
        {"policy": (HUB_MODEL,), "prompts": (made("prepare", "test.parquet"),)},
        "705b093d47dc02cb0258496a239acc63abd8b8eddc541a201a7695e59cba8636",
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
        "b97a1c03593bda9dcdcb6b256239233006ac328d42ce263a3cb6d65fcfb0c23e",
    ),
    (PairParams(), SCORED, "d7cf8ad8553ef27262b3202189f5b2b4e4e36435095290556278d2867d2c25a4"),
    (
        PairParams(strategy="random", ties="keep"),
        SCORED,
        "b5ceabf66d09973efe9161883e0f03fa442773d0a54c11852edcd26be187d68b",
    ),
    (
        TrainParams(),
        {"policy": (CHECKPOINT,), "reference": (CHECKPOINT,), "pairs": (PAIRS, PAIRS)},
        "3e92b2d0aec27016f02144ee30fec17dedb9e9aebc7f3b953dc65293a9107dce",
    ),
    (
        TrainParams(divergence=0.5, design="arctanh", reference="initial"),
        {"policy": (CHECKPOINT,), "reference": (CHECKPOINT,), "pairs": (PAIRS,)},
        "a5cf61a1435e9cbbb553eb0edc76157aa60b463a06cba647d6e5a94f06020399",
    ),
    (
        TrainParams.model_validate({"objective": "python", "python": {"settings": {"beta": 1}}}),
        {"policy": (CHECKPOINT,), "reference": (CHECKPOINT,), "pairs": (PAIRS,), "code": (FILE,)},
        "5174e82f156c408d5a45617aee6c919156f6f3fb4284f3171b687e180ae93863",
    ),
    (
        PreferencesParams(),
        {
            "data": (HUB,),
            "prompts": (made("prepare", "iteration-1.parquet"),),
            "policy": (CHECKPOINT,),
        },
        "079d02d25d8277ad8954fccc7a1575e15574f8a429cd36243eaac1a524d29da9",
    ),
    (
        EvaluateParams(),
        {
            **SCORED,
            "base_responses": (RESPONSES,),
            "base_scores": (SCORES,),
            "reference": (CHECKPOINT,),
        },
        "df6d5781e8e99cce603b082a928adac3f68090b0c8bcdfa77558b35bba4267e4",
    ),
    (
        PromoteParams(model_name="model", better_than_base_confidence=None),
        {"checkpoint": (CHECKPOINT,), "metrics": (made("evaluate", "metrics.json"),)},
        "b44f276ff21bf2010f294895d665c3d1e8d87da2db7b31e76eb0488c42dacb44",
    ),
]


@pytest.mark.parametrize(
    ("params", "inputs", "key"),
    GOLDEN,
    ids=[f"{params.stage}-{key[:6]}" for params, _, key in GOLDEN],
)
def test_a_request_has_the_key_that_it_always_had(params, inputs, key):
    assert make_request(params, inputs=inputs, seed=7, store="store").key == key
