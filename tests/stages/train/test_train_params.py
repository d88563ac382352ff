"""Settings of a training by themselves: which exclude each other, and κ's place in the key."""

import pytest

from stages.train.params import TrainParams


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"kappa": 1.0, "target_ratio": 0.1}, r"exclude each other.*`train\.kappa: null`"),
        (
            {"lora": {"save": "adapter"}},
            r"lora\.save = 'adapter' with lora\.rank = 0.*set lora\.rank",
        ),
    ],
    ids=str,
)
def test_settings_that_exclude_each_other_are_refused(given, said):
    with pytest.raises(ValueError, match=said):
        TrainParams(**given)


@pytest.mark.parametrize("given", [{}, {"kappa": 0.5}, {"target_ratio": 0.1}])
def test_kappa_survives_a_request_and_keeps_its_place_in_the_key(given):
    params = TrainParams(**given)
    again = TrainParams.model_validate_json(params.model_dump_json())
    assert again == params
    assert again.result_fields()["kappa"] == given.get("kappa", 1.0)
