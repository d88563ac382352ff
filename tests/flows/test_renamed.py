"""Settings under their old names: files, `--set`, the form, grids and stored runs still load."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import yaml

from flows.execution.run_record import RunRecord
from flows.pipeline.config import RunConfig
from flows.pipeline.loading import load_config, load_overridden, with_fields
from flows.pipeline.renamed import RENAMED, RenamedSettingWarning
from stages.contract.errors import UserError
from stages.contract.local_store import LocalStore

# Of each old setting: a value that is not its default, as files of that time have it.
OLD = {
    "generate.batch_size": 512,
    "score.function": "mark",
    "score.grading_timeout_seconds": 3.5,
    "score.engine": "vllm",
    "score.dtype": "float32",
    "score.max_length_tokens": 4096,
    "score.tokens_per_batch": 1024,
    "score.gpu_memory_utilization": 0.5,
    "score.kv_cache_gib": 2.0,
    "score.concurrency": 3,
    "score.judge_model": "some-judge",
    "score.judge_mode": "pairwise",
    "score.judge_opponents": 4,
    "score.judge_lowest": 0.0,
    "score.judge_highest": 5.0,
    "score.judge_max_tokens": 64,
    "score.judge_prompt_price": 2.5,
    "score.judge_completion_price": 7.5,
    "score.remote_identity": "length@1",
    "score.remote_url": "http://127.0.0.1:8000",
    "score.remote_key_env": "REWARD_KEY",
    "score.remote_timeout_seconds": 9.0,
    "score.remote_attempts": 2,
    "score.remote_wait_seconds": 0.5,
    "score.rows_per_request": 7,
}


def nested(settings: dict[str, Any]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, value in settings.items():
        section, _, last = name.partition(".")
        values.setdefault(section, {})[last] = value
    return values


def found(config: RunConfig, name: str) -> Any:
    value: Any = config
    for part in name.split("."):
        value = getattr(value, part)
    return value


def assert_moved(config: RunConfig) -> None:
    for old, places in RENAMED.items():
        for new in places:
            assert found(config, new) == OLD[old] != found(RunConfig(), new), new


def write(path: Path, values: dict[str, Any]) -> Path:
    path.write_text(yaml.safe_dump(values))
    return path


def test_each_old_name_has_a_row_here() -> None:
    assert OLD.keys() == RENAMED.keys()


def test_files_with_old_names_load_and_are_told_the_new(tmp_path: Path) -> None:
    with pytest.warns(RenamedSettingWarning, match=r"old\.yaml") as told:
        config = load_config(write(tmp_path / "old.yaml", nested(OLD)))
    assert_moved(config)
    said = " ".join(str(each.message) for each in told)
    for old, places in RENAMED.items():
        assert f"{old} is now {' and '.join(places)}" in said


def test_overrides_forms_and_grids_with_old_names_load(tmp_path: Path) -> None:
    base = write(tmp_path / "base.yaml", {"seed": 1})
    with pytest.warns(RenamedSettingWarning, match="--set"):
        assert_moved(load_config(base, [f"{name}={json.dumps(OLD[name])}" for name in OLD]))
    with pytest.warns(RenamedSettingWarning, match="the form"):
        assert_moved(load_overridden(base, nested(OLD), "the form"))
    with pytest.warns(RenamedSettingWarning, match="the grid"):
        assert_moved(with_fields(load_config(base), OLD, "the grid"))
    judge = {"oracle": "judge", "judge_model": "m", "remote_url": "http://x"}
    with pytest.warns(RenamedSettingWarning, match=r"score\.judge\.model"):
        config = load_config(base, [f"score={json.dumps(judge)}"])
    assert (config.score.judge.model, config.score.judge.url) == ("m", "http://x")


def test_a_stored_run_loads_and_only_what_someone_set_is_told(tmp_path: Path) -> None:
    run = RunRecord(LocalStore.open(str(tmp_path / "store"), create=True), "old")
    run.path.mkdir(parents=True)
    resolved = json.loads(RunConfig(name="old").to_json())
    # As configurations were kept: all settings, most with their defaults.
    defaults = {old: found(RunConfig(), places[0]) for old, places in RENAMED.items()}
    for section, fields in nested(defaults | {"score.function": "mark"}).items():
        kept = {
            name: value
            for name, value in resolved[section].items()
            if not isinstance(value, dict) or name in ("vllm", "openai", "chat_template_args")
        }
        resolved[section] = kept | fields
    (run.path / "config.json").write_text(json.dumps(resolved))
    with pytest.warns(RenamedSettingWarning) as told:
        config = run.config()
    assert config == RunConfig(name="old", score={"python": {"function": "mark"}})
    [warning] = told
    assert str(warning.message).endswith(": score.function is now score.python.function")
    run.save_config(config)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert run.config() == config


def test_what_is_read_last_wins_under_whatever_name(tmp_path: Path) -> None:
    write(tmp_path / "old.yaml", {"score": {"judge_max_tokens": 1, "judge_opponents": 1}})
    new = {"extends": "old.yaml", "score": {"judge": {"max_tokens": 2}}}
    path = write(tmp_path / "new.yaml", new)
    with pytest.warns(RenamedSettingWarning):
        judge = load_config(path).score.judge
        assert (judge.max_tokens, judge.opponents) == (2, 1)
        assert load_config(path, ["score.judge_max_tokens=3"]).score.judge.max_tokens == 3


def test_one_file_that_sets_both_is_refused(tmp_path: Path) -> None:
    both = {"score": {"judge_mode": "scored", "judge": {"mode": "pairwise"}}}
    with pytest.raises(UserError, match=r"sets both score\.judge\.mode and score\.judge_mode"):
        load_config(write(tmp_path / "both.yaml", both))


def test_a_stored_calibrated_run_that_names_the_default_kappa_loads(tmp_path: Path) -> None:
    run = RunRecord(LocalStore.open(str(tmp_path / "store"), create=True), "old")
    config = RunConfig(name="old", train={"target_ratio": 0.1})
    run.save_config(config)
    assert run.config() == config
    stored = json.loads(config.to_json())
    stored["train"]["kappa"] = 1.0
    (run.path / "config.json").write_text(json.dumps(stored))
    assert run.config() == config
