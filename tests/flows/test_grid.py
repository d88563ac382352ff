"""The runs of a sweep."""

from __future__ import annotations

import pytest

from flows.pipeline.grid import cells, parse_axes, spread
from flows.pipeline.presets import configured
from stages.contract.errors import UserError


def test_a_grid_times_seeds_with_names_of_their_own() -> None:
    axes = parse_axes(["train.kappa=0.5,1e-3", "train.design=none,arctanh"])
    assert axes == {"train.kappa": [0.5, "1e-3"], "train.design": ["none", "arctanh"]}
    found = cells("try", configured("quickstart", {}), parse_axes(["train.kappa=0.5,1"]), [0, 7])
    assert [each.config.name for each in found] == [
        "try-kappa_0.5-s0",
        "try-kappa_0.5-s7",
        "try-kappa_1-s0",
        "try-kappa_1-s7",
    ]
    assert [(each.config.train.kappa, each.config.seed) for each in found] == [
        (0.5, 0),
        (0.5, 7),
        (1, 0),
        (1, 7),
    ]
    assert {each.label() for each in found} == {"train.kappa=0.5", "train.kappa=1"}


def test_a_long_name_is_cut_and_stays_a_name_of_its_own() -> None:
    config = configured("quickstart", {})
    axes = {"inputs.policy": [f"owner/{'x' * 120}{end}" for end in "ab"]}
    names = [each.config.name for each in cells("try", config, axes, [0])]
    assert len(set(names)) == 2
    assert max(map(len, names)) <= 100


@pytest.mark.parametrize(
    ("axis", "said"),
    [
        ("train.kappa", "is not FIELD=VALUE"),
        ("train.kappa=", "is not FIELD=VALUE"),
        ("train.kappa=1,1", "twice"),
        ("seed=1,2", "set by the sweep"),
    ],
)
def test_a_wrong_axis_is_refused(axis: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        parse_axes([axis])


@pytest.mark.parametrize(
    ("axes", "seeds", "said"),
    [
        ({"train.kapa": [1]}, [0], "did you mean 'kappa'"),
        ({"train.kappa": [-1]}, [0], "train.kappa"),
        ({}, [], "seeds"),
        ({}, [1, 1], "seeds"),
    ],
)
def test_a_wrong_cell_is_refused(axes: dict[str, list[int]], seeds: list[int], said: str) -> None:
    with pytest.raises(UserError, match=said):
        cells("try", configured("quickstart", {}), axes, seeds)


def test_mean_and_spread() -> None:
    assert spread([0.5, 0.7], ".3f") == "0.600 ± 0.14"
    assert spread([0.5, None], ".3f") == "0.500"
    assert spread([10, 11], "d") == "10.5 ± 0.71"
    assert spread([None], ".3f") == "-"
