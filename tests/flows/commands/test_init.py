"""`geb init`: folders that run as they are."""

import sys
from pathlib import Path

import pytest

from flows.commands.init import write_task
from flows.pipeline.algorithm import unread_steps
from flows.pipeline.loading import load_config
from tests.flows.loop import geb, geb_ok
from tests.programs import run_program
from tests.tiny_models import make_tiny_llama


def test_a_small_model_s_task_has_a_learning_rate_for_small_models(tmp_path):
    rates = []
    for policy in (make_tiny_llama(tmp_path / "tiny"), "owner/model"):
        folder = tmp_path / f"task-{len(rates)}"
        geb_ok("init", folder, "--policy", policy)
        rates.append(load_config(folder / "geb.yaml").train.learning_rate)
    assert rates == [3e-5, 5e-7]


@pytest.mark.parametrize("policy", [None, "owner/model"])
def test_a_task_is_a_valid_configuration(tmp_path, policy):
    geb_ok("init", tmp_path / "my task", *(["--policy", policy] if policy else []))
    config = load_config(tmp_path / "my task/geb.yaml")
    assert config.name == "my-task"
    assert config.store == str(tmp_path / "my task/store")
    assert config.score.oracle == "python"
    assert config.inputs.policy == policy
    assert any(step.name == "sft" for step in unread_steps(config)) is (policy is None)
    assert config.train.probability == ("token_mean" if policy else "sequence")
    for place in (*config.inputs.prompts, config.inputs.warm_start, config.inputs.oracle_code):
        assert place is None or Path(place).exists()
    assert {path.name for path in (tmp_path / "my task").iterdir()} == {
        *("geb.yaml", "README.md", "prompts.jsonl", "oracle.py", "test_oracle.py"),
        *([] if policy else ["conversations.jsonl"]),
    }


@pytest.mark.parametrize("gpus", ["", "0,1"])
def test_stages_ask_for_the_gpus_that_this_machine_has(tmp_path, monkeypatch, gpus):
    monkeypatch.setenv("GEB_GPUS", gpus)
    write_task(tmp_path / "task", "a/b")
    resources = load_config(tmp_path / "task/geb.yaml").resources
    gpu_counts = {getattr(resources, stage).gpus for stage in ("generate", "train", "evaluate")}
    assert gpu_counts == ({1} if gpus else {0})


@pytest.mark.parametrize("name", ["2024", "1e5", "true", "null", "task-" * 30])
def test_a_folder_s_name_becomes_the_run_s(tmp_path, name):
    place = "x: y #1, {z}"
    write_task(tmp_path / name, place)
    config = load_config(tmp_path / name / "geb.yaml")
    assert config.name == name[:100]
    assert config.inputs.policy.endswith(place)


def test_the_sample_plans_without_warnings_and_its_tests_pass(tmp_path):
    folder = tmp_path / "desk"
    assert geb("init", folder).returncode == 0
    planned = geb_ok("plan", folder / "geb.yaml")
    assert planned.stderr == ""
    tested = run_program(*(sys.executable, "-m", "pytest", "-p", "no:cacheprovider"), cwd=folder)
    assert tested.returncode == 0, tested.stdout
