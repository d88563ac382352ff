"""The runs of a sweep."""

import json

import pytest

from flows.pipeline.grid import cells, parse_axes
from flows.pipeline.loading import load_config
from flows.pipeline.presets import NO_PRESET, configured
from flows.report.summary import kappa_label
from stages.contract import number_types
from stages.contract.errors import UserError


def test_a_grid_times_seeds_with_names_of_their_own():
    axes = parse_axes(["train.kappa=0.5,1e-3", "train.deepspeed.zero_stage=off,1"])
    assert axes == {"train.kappa": [0.5, 1e-3], "train.deepspeed.zero_stage": ["off", 1]}
    planned = cells(
        "try", [configured("quickstart", {})], parse_axes(["train.kappa=0.5,1"]), [0, 7]
    )
    runs = [(cell.config.name, cell.config.train.kappa, cell.config.seed) for cell in planned]
    assert runs == [
        ("try-train.kappa_0.5-s0", 0.5, 0),
        ("try-train.kappa_0.5-s7", 0.5, 7),
        ("try-train.kappa_1-s0", 1, 0),
        ("try-train.kappa_1-s7", 1, 7),
    ]
    assert {cell.method for cell in planned} == {"train.kappa=0.5", "train.kappa=1"}


def test_a_sweep_without_seeds_keeps_the_seed():
    planned = cells("try", [configured("quickstart", {"seed": 7})], {"train.kappa": [0.5, 1]}, [])
    assert [cell.config.seed for cell in planned] == [7, 7]


def test_runs_over_equal_names_of_two_sections_have_distinct_names():
    """Otherwise two sweeps of one configuration would write the same runs."""
    names = set()
    for section in ("generate", "evaluation"):
        axes = {f"{section}.temperature": [0.7, 1.0]}
        planned = cells("try", [configured("quickstart", {})], axes, [0])
        names |= {cell.config.name for cell in planned}
    assert len(names) == 4


def test_several_configurations_are_methods_beside_each_other():
    configs = [configured(name, {}) for name in ("quickstart", "quickstart-fdpo")]
    planned = cells("try", configs, parse_axes(["train.epochs=1,2"]), [0])
    assert [(cell.config.name, cell.method) for cell in planned] == [
        ("try-quickstart-train.epochs_1-s0", "quickstart, train.epochs=1"),
        ("try-quickstart-train.epochs_2-s0", "quickstart, train.epochs=2"),
        ("try-quickstart-fdpo-train.epochs_1-s0", "quickstart-fdpo, train.epochs=1"),
        ("try-quickstart-fdpo-train.epochs_2-s0", "quickstart-fdpo, train.epochs=2"),
    ]
    designs = [(cell.config.train.design, cell.config.train.epochs) for cell in planned]
    assert designs == [("one_minus_pi", 1), ("one_minus_pi", 2), ("none", 1), ("none", 2)]
    alone = cells("try", configs, {}, [3])
    assert [cell.method for cell in alone] == ["quickstart", "quickstart-fdpo"]


def test_configurations_that_no_sweep_can_tell_apart_are_refused():
    config = configured("quickstart", {})
    with pytest.raises(UserError, match="quickstart"):
        cells("try", [config, config], {}, [0])
    with pytest.raises(UserError, match="no configuration"):
        cells("try", [], {}, [0])
    other = configured("quickstart-fdpo", {"store": "elsewhere"})
    with pytest.raises(UserError, match="--store") as refused:
        cells("try", [config, other], {}, [0])
    assert "elsewhere" in str(refused.value)


@pytest.mark.parametrize(
    "policies",
    [("owner/a_b", "owner_a/b", "owner/other"), tuple(f"owner/{'x' * 120}{end}" for end in "ab")],
    ids=["signs", "long"],
)
def test_values_that_no_name_can_hold_get_names_of_their_own(policies):
    config = configured("quickstart", {})
    axes = {"inputs.policy": policies}
    names = [cell.config.name for cell in cells("try", [config], axes, [0, 1])]
    assert len(set(names)) == 2 * len(policies)
    assert max(map(len, names)) <= 100
    assert names == [cell.config.name for cell in cells("try", [config], axes, [0, 1])]


@pytest.mark.parametrize(
    "axis",
    [
        "train.lora.rank=0,16",
        "inputs.preferences=a.jsonl,b.jsonl",
        "train.deepspeed.zero_stage=off,1",
        "train.divergence=hellinger,0.5",
    ],
)
def test_a_cell_is_what_a_run_with_its_settings_is(axis, tmp_path, monkeypatch):
    info = tmp_path / "cpuinfo"
    info.write_text("flags\t\t: fpu avx512f avx512_bf16\n")
    monkeypatch.setattr(number_types, "CPU_INFO", info)
    path = tmp_path / "run.yaml"
    path.write_text("inputs: {policy: owner/model, preferences: first.jsonl}\n")
    name, _, values = axis.partition("=")
    planned = cells("try", [load_config(path)], parse_axes([axis]), [3])
    for value, cell in zip(values.split(","), planned, strict=True):
        fixed = [f"name={cell.config.name}", "seed=3", "promote.aliases=[]"]
        run = load_config(path, [f"{name}={value}", *fixed])
        assert cell.config.to_values() == run.to_values()


def test_a_cell_s_mapping_replaces_the_configuration_s(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(
        "inputs: {policy: owner/model}\n"
        "score: {oracle: weighted, weighted: {weights: {python: 1}}, python: {function: rate}}\n"
    )
    axis = "score.weighted.weights={python: 2},{math_verify: 1}"
    planned = cells("try", [load_config(path)], parse_axes([axis]), [0])
    weights = [cell.config.score.weighted.weights for cell in planned]
    assert weights == [{"python": 2}, {"math_verify": 1}]
    assert [cell.config.score.python.function for cell in planned] == ["rate", "rate"]
    alone = load_config(path, ["score.weighted.weights={math_verify: 1}"])
    assert alone.score.weighted.weights == {"math_verify": 1}


@pytest.mark.parametrize("name", ["../elsewhere", "two words", "", "-x", "x" * 201])
def test_a_name_outside_the_store_is_refused(name):
    with pytest.raises(UserError, match="cannot name a sweep"):
        cells(name, [configured("quickstart", {})], {}, [0])


def test_a_grid_over_kappa_excludes_a_target_ratio():
    calibrated = _calibrated()
    for axes in ({"train.kappa": [1.0]}, {"train.kappa": [0.5, 2]}):
        with pytest.raises(UserError, match=r"target_ratio = 0\.001 exclude each other"):
            cells("try", [calibrated], axes, [0])
    weighted = {"train.kappa": [0.5, 2], "train.target_ratio": [None]}
    assert [cell.config.train.kappa for cell in cells("try", [calibrated], weighted, [0])] == [
        0.5,
        2,
    ]
    ratios = {"train.target_ratio": [1e-3, 1e-2]}
    # As a sweep gets it: through JSON.
    again = configured(NO_PRESET, json.loads(calibrated.to_json()))
    assert [cell.config.train.target_ratio for cell in cells("try", [again], ratios, [0])] == [
        1e-3,
        1e-2,
    ]


def test_the_baseline_and_a_calibrated_design_are_one_grid():
    axes = {"train.design": ["none", "one_minus_pi"]}
    runs = [cell.config for cell in cells("try", [_calibrated()], axes, [0])]
    assert [run.name for run in runs] == [
        "try-train.design_none-s0",
        "try-train.design_one_minus_pi-s0",
    ]
    assert [kappa_label(run.train) for run in runs] == ["", "ratio 0.001"]


def _calibrated():
    return configured("llama3-geb-p-kl", {})
