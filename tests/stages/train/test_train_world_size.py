"""A training goes on with another number of processes than wrote its checkpoint."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from stages.contract.errors import StageFailedError
from tests.stages.train.train_helpers import Killer, Trained, make_pairs, train

pytestmark = pytest.mark.slow

SETTINGS = {
    "epochs": 4,
    "micro_batch_tokens": 32,
    "target_ratio": 0.5,
    "calibration_batches": 2,
    # Not for all weights: each group must get back its own.
    "weight_decay": 0.5,
    "checkpoint_every_steps": 1,
}
KILLED_AT = 5


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    return make_pairs(tmp_path_factory.mktemp("pairs") / "pairs.parquet", 21, ties=(3, 7))


def said(trained: Trained) -> str:
    return "\n".join(event["message"] for event in trained.events if event["type"] == "log")


@pytest.mark.parametrize(
    ("zero_stage", "before", "after", "rank"),
    [(1, 2, 1, 0), (2, 1, 2, 4), (3, 2, 1, 0), (3, 1, 2, 4)],
)
def test_it_goes_on_as_it_would_have(tmp_path, policy, pairs, zero_stage, before, after, rank):
    lora = {"rank": rank, "alpha": 8.0}
    settings = SETTINGS | {"deepspeed": {"zero_stage": zero_stage}, "lora": lora}
    whole = train(tmp_path / "whole", policy, [pairs], processes=before, **settings)
    interrupted = [tmp_path / "store", policy, [pairs]]
    with pytest.raises(StageFailedError, match="training process"):
        train(*interrupted, processes=before, on_event=Killer(KILLED_AT), **settings)
    resumed = train(*interrupted, processes=after, **settings)

    assert f"written by {before} processes, now there are {after}" in said(resumed)
    first = next(event for event in resumed.events if event["type"] == "metric")
    assert first["step"] >= KILLED_AT
    assert resumed.losses == pytest.approx(whole.losses, rel=1e-4, abs=1e-5)
    expected = load_file(whole.artifact.path / "checkpoint" / "model.safetensors")
    weights = load_file(resumed.artifact.path / "checkpoint" / "model.safetensors")
    assert weights.keys() == expected.keys()
    for name, weight in weights.items():
        torch.testing.assert_close(weight, expected[name], rtol=1e-4, atol=1e-4, msg=name)
