"""`geb init`: folders that run as they are."""

import sys
from pathlib import Path

import pytest

from flows.commands.init import Kind, write_task
from flows.pipeline.algorithm import step_names
from flows.pipeline.loading import load_config
from tests.flows.loop import geb, geb_ok, geb_refused
from tests.programs import run_program

KINDS = {
    "function": ("python", []),
    "model": ("reward_model", ["--reward-model", "owner/reward"]),
    "answers": ("math_verify", []),
    "judge": ("judge", ["--judge-url", "http://127.0.0.1:9/v1", "--judge-model", "marker"]),
}


@pytest.mark.parametrize("policy", [None, "owner/model"])
@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_task_is_a_valid_configuration(
    tmp_path: Path, kind: str, policy: str | None
) -> None:
    oracle, options = KINDS[kind]
    more = ["--policy", policy] if policy else []
    geb_ok("init", tmp_path / "my task", "--kind", kind, *options, *more)
    config = load_config(tmp_path / "my task/geb.yaml")
    assert config.name == "my-task"
    assert config.store == str(tmp_path / "my task/store")
    assert config.score.oracle == oracle
    assert config.inputs.policy == policy
    assert ("sft" in step_names(config)) is (policy is None)
    assert config.train.probability == ("token_mean" if policy else "sequence")
    for place in (*config.inputs.prompts, config.inputs.warm_start, config.inputs.oracle_code):
        assert place is None or Path(place).exists()
    assert {each.name for each in (tmp_path / "my task").iterdir()} == {
        *("geb.yaml", "README.md", "prompts.jsonl"),
        *([] if policy else ["conversations.jsonl"]),
        *(["oracle.py", "test_oracle.py"] if kind == "function" else []),
    }


@pytest.mark.parametrize("gpus", ["", "0,1"])
def test_stages_ask_for_the_gpus_that_this_machine_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpus: str
) -> None:
    monkeypatch.setenv("GEB_GPUS", gpus)
    write_task(tmp_path / "task", Kind.MODEL, {"policy": "a/b", "reward_model": "a/c"})
    resources = load_config(tmp_path / "task/geb.yaml").resources
    asked = {getattr(resources, stage).gpus for stage in ("generate", "train", "score")}
    assert asked == ({1} if gpus else {0})


@pytest.mark.parametrize("name", ["2024", "1e5", "true", "null"])
def test_a_folder_s_name_that_yaml_reads_as_something_else(tmp_path: Path, name: str) -> None:
    place = "x: y #1, {z}"
    answers = {"policy": place, "judge_model": place, "judge_url": f"http://localhost/{place}"}
    write_task(tmp_path / name, Kind.JUDGE, answers)
    config = load_config(tmp_path / name / "geb.yaml")
    assert config.name == name
    assert config.score.judge.model == place
    assert config.score.judge.url == answers["judge_url"]
    assert config.inputs.policy is not None
    assert config.inputs.policy.endswith(place)


def test_a_folder_with_a_name_longer_than_a_run_s(tmp_path: Path) -> None:
    name = "task-" * 30
    write_task(tmp_path / name, Kind.FUNCTION, {"policy": None})
    assert load_config(tmp_path / name / "geb.yaml").name == name[:100]


def test_the_sample_runs_plan_without_a_warning_and_the_reward_s_tests_pass(tmp_path: Path) -> None:
    folder = tmp_path / "desk"
    assert geb("init", folder).returncode == 0, "without a terminal, a reward function"
    planned = geb_ok("plan", folder / "geb.yaml")
    assert planned.stderr == ""
    tested = run_program(*(sys.executable, "-m", "pytest", "-p", "no:cacheprovider"), cwd=folder)
    assert tested.returncode == 0, tested.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--kind", "model"], "--reward-model is missing"),
        (["--kind", "judge", "--judge-url", "http://x/v1"], "--judge-model is missing"),
        (["--kind", "oracle"], "'oracle' is not one of"),
    ],
)
def test_what_is_missing_is_named(tmp_path: Path, arguments: list[str], said: str) -> None:
    assert said in geb_refused("init", tmp_path / "task", *arguments)
    assert not (tmp_path / "task").exists()


def test_a_folder_with_something_in_it_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "letter.txt").write_text("dear")
    assert f"{tmp_path} is there and not empty" in geb_refused("init", tmp_path)
    assert [each.name for each in tmp_path.iterdir()] == ["letter.txt"]
