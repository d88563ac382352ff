"""Settings of a training by themselves: which exclude each other, and which enter the key."""

from __future__ import annotations

import pytest

from stages.train.params import TrainParams
from tests.stages.train.train_helpers import request_for


def test_what_only_changes_speed_is_not_in_the_key(tmp_path, policy, pairs):
    plain = request_for(tmp_path / "store", policy, [pairs])
    fast = request_for(
        tmp_path / "store",
        policy,
        [pairs],
        processes=2,
        micro_batch_tokens=1,
        gradient_checkpointing=True,
        deepspeed={"zero_stage": 3},
        checkpoint_every_steps=1,
        report_to=["tensorboard"],
    )
    assert fast.key == plain.key
    assert request_for(tmp_path / "store", policy, [pairs], kappa=0.5).key != plain.key


@pytest.mark.parametrize("reference", ["initial", "ema"])
def test_the_sampler_is_no_other_reference(reference):
    with pytest.raises(ValueError, match=f"reference = '{reference}'.*would be ignored"):
        TrainParams(reference_logprobs="sampler", reference=reference)


@pytest.mark.parametrize(
    "given", [{"kappa": 1.0}, {"kappa_values": (1.0,), "kappa_schedule": "per_iteration"}]
)
def test_kappa_is_given_or_calibrated(given):
    with pytest.raises(ValueError, match=r"exclude each other.*`train\.kappa: null`"):
        TrainParams(target_ratio=0.1, **given)


@pytest.mark.parametrize("given", [{}, {"kappa": 0.5}, {"target_ratio": 0.1}])
def test_kappa_survives_a_request_and_keeps_its_place_in_the_key(given):
    params = TrainParams(**given)
    again = TrainParams.model_validate_json(params.model_dump_json())
    assert again == params
    assert again.result_fields()["kappa"] == given.get("kappa", 1.0)


def test_adapters_that_are_not_trained_cannot_be_saved():
    with pytest.raises(
        ValueError, match=r"lora\.save = 'both' with lora\.rank = 0.*set lora\.rank"
    ):
        TrainParams(lora={"save": "both"})


def test_compiled_layers_are_in_the_key_and_need_whole_weights():
    assert "compile" not in TrainParams().result_fields()
    assert TrainParams(compile=True).result_fields()["compile"] is True
    with pytest.raises(ValueError, match=r"compile = true with deepspeed\.zero_stage = 3"):
        TrainParams(compile=True, deepspeed={"zero_stage": 3})


def test_one_library_shards_and_is_not_in_the_key():
    assert "sharding" not in TrainParams(sharding="fsdp2").result_fields()
    with pytest.raises(ValueError, match=r"sharding = 'fsdp2' with settings of deepspeed"):
        TrainParams(sharding="fsdp2", deepspeed={"zero_stage": 2})
