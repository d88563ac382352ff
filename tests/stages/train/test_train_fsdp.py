"""Training in shards by FSDP2: the curve and the weights of one process that holds all."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaForCausalLM

from stages.contract.errors import StageFailedError
from tests.stages.train.train_helpers import (
    Killer,
    Trained,
    at_step,
    make_pairs,
    request_for,
    run_until,
    train,
)
from tests.tiny_models import make_tiny_llama

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("forked_workers")]

FSDP = {"sharding": "fsdp2"}
SETTINGS = {
    "micro_batch_tokens": 16,
    "target_ratio": 0.5,
    "calibration_batches": 2,
    # Not for all weights: each group must get back its own.
    "weight_decay": 0.5,
}


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    # The last batch of an epoch has fewer pairs than there are micro-batches to fill.
    return make_pairs(tmp_path_factory.mktemp("pairs") / "pairs.parquet", 21, ties=(3, 7))


def assert_same_training(found: Trained, expected: Trained, folders=("checkpoint",)) -> None:
    """Same curves, same names, and the same weights within float tolerance."""
    assert found.losses == pytest.approx(expected.losses, rel=1e-4, abs=1e-5)
    for name in ("kappa", "num_pairs", "grad_norm"):
        curve = [record[name] for record in found.records]
        assert curve == pytest.approx([record[name] for record in expected.records], rel=1e-3), name
    for folder in folders:
        weights, others = (
            load_file(each.artifact.path / folder / "model.safetensors")
            for each in (found, expected)
        )
        assert weights.keys() == others.keys()
        for name, weight in weights.items():
            torch.testing.assert_close(weight, others[name], rtol=1e-4, atol=1e-4, msg=name)


def test_checkpointed_activations_and_validation_are_those_of_one_process(tmp_path, policy, pairs):
    # Each process maps these files, and casts what it keeps of them.
    low = LlamaForCausalLM.from_pretrained(policy, dtype=torch.bfloat16)
    policy = shutil.copytree(policy, tmp_path / "bfloat16")
    low.save_pretrained(policy)
    settings = SETTINGS | {"gradient_checkpointing": True, "validation_share": 0.2}
    settings |= {"precision": "float32", "save_dtype": "float32"}
    plain = train(tmp_path / "plain", policy, [pairs], **settings)
    found = train(tmp_path / "store", policy, [pairs], processes=2, **settings, **FSDP)
    assert_same_training(found, plain)
    assert found.artifact.manifest.key == plain.artifact.manifest.key


def test_one_weight_for_embeddings_and_head_is_trained_as_in_one_process(tmp_path, pairs):
    policy = make_tiny_llama(tmp_path / "policy", tie_word_embeddings=True)
    settings = SETTINGS | {"reference_kind": "ema", "epochs": 1}
    plain = train(tmp_path / "plain", policy, [pairs], **settings)
    found = train(tmp_path / "store", policy, [pairs], processes=2, **settings, **FSDP)
    assert_same_training(found, plain, ("checkpoint", "ema"))


@pytest.mark.parametrize(("before", "after", "rank"), [(2, 1, 4), (1, 2, 0)])
def test_another_number_of_processes_goes_on(tmp_path, policy, pairs, before, after, rank):
    settings = SETTINGS | {"lora": {"rank": rank, "alpha": 8.0}, "reference_kind": "ema"}
    plain = train(tmp_path / "plain", policy, [pairs], **settings)

    interrupted = [tmp_path / "store", policy, [pairs]]
    settings |= FSDP | {"checkpoint_every_steps": 1}
    with pytest.raises(StageFailedError, match="training process"):
        train(*interrupted, processes=before, on_event=Killer(2), **settings)
    resumed = train(*interrupted, processes=after, **settings)
    first = next(event for event in resumed.events if event["type"] == "metric")
    assert first["step"] > 1
    assert_same_training(resumed, plain, ("checkpoint", "ema"))


def test_sigterm_saves_and_the_retry_ends_with_the_same_bytes(tmp_path, policy, pairs):
    settings = SETTINGS | FSDP | {"processes": 2, "epochs": 8}
    whole = train(tmp_path / "whole", policy, [pairs], **settings)
    request = request_for(tmp_path / "store", policy, [pairs], **settings)
    ended = run_until(request, tmp_path, at_step(3), lambda process: process.terminate())
    assert ended.code == 143
    assert json.loads(ended.lines[-1])["kind"] == "stopped"
    resumed = train(tmp_path / "store", policy, [pairs], **settings)
    assert resumed.weights == whole.weights
    assert resumed.losses == whole.losses
