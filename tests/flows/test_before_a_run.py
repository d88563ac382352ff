"""Words of `geb plan` and `geb run` before the first stage: cautions, an oracle that fails."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from typer.testing import CliRunner

from flows.commands.cli import app
from flows.execution.oracle_trial import try_oracle
from flows.execution.plan import plan
from flows.execution.run_record import RunRecord, StepRecord
from flows.pipeline.config import RunConfig
from flows.pipeline.loading import load_config
from flows.planning.cautions import cautions
from stages.contract.errors import UserError
from stages.contract.stores import open_store
from tests.flows.loop import geb, write_config
from tests.flows.probes import wait_until


def config(folder: Path, rows: int, **changes: Any) -> RunConfig:
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"{n}?"}) + "\n" for n in range(rows)))
    values = {"inputs": {"prompts": [str(prompts)]}, "iterations": 1} | changes
    return RunConfig.model_validate(values)


def test_few_steps_small_moves_and_few_held_out_prompts_are_told_with_their_numbers(
    tmp_path: Path,
) -> None:
    [bonus, steps, move, prompts] = cautions(config(tmp_path, 137, prepare={"test_prompts": 16}))
    assert "responses have up to 2048 tokens" in bonus
    assert "2 steps in an iteration: at most 121 pairs in batches of 256, 2 epochs" in steps
    assert "train.global_batch_pairs to 12 or less" in steps
    assert "train.learning_rate is 5e-07" in move
    assert "16 held-out prompts" in prompts
    assert "±24 points" in prompts


def test_settings_that_can_work_are_not_told_of(tmp_path: Path) -> None:
    train = {"global_batch_pairs": 32, "learning_rate": 1e-5, "probability": "token_mean"}
    assert cautions(config(tmp_path, 1000, train=train)) == []
    [told] = cautions(
        config(tmp_path, 1000, train=train, promote={"better_than_base_confidence": None})
    )
    assert "promotion asks for no win over the base" in told


def test_a_file_without_held_out_prompts_is_left_to_its_stage(tmp_path: Path) -> None:
    empty = tmp_path / "test.jsonl"
    empty.write_text("")
    prompts = {"test_prompts": str(empty)}
    own = config(tmp_path, 1000)
    told = cautions(own.model_copy(update={"inputs": own.inputs.model_copy(update=prompts)}))
    assert not any("held-out" in each for each in told)


def test_a_plan_has_the_words_of_a_failure_as_they_are(tmp_path: Path) -> None:
    path = write_config(tmp_path)
    loaded = load_config(path)
    [first, *_] = plan(loaded)
    assert first.key is not None
    failed = StepRecord(
        step=first.step,
        stage=first.stage,
        key=first.key,
        key_fields={},
        state="failed",
        started=0,
        message="[/data] is full",
    )
    RunRecord(open_store(loaded.store), loaded.name).save_step(failed)
    shown = CliRunner().invoke(app, ["plan", str(path)])
    assert shown.exception is None
    assert "it failed: [/data] is full" in shown.output


def test_plan_warns_beside_its_document(tmp_path: Path) -> None:
    done = geb("plan", write_config(tmp_path), "--json")
    assert done.returncode == 0
    assert "warning train takes 4 steps" in " ".join(done.stderr.split())
    assert json.loads(done.stdout)


def test_plan_and_estimate_tell_of_a_disk_that_is_too_small(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda place: SimpleNamespace(free=1000))
    shown = CliRunner().invoke(app, ["plan", str(write_config(tmp_path)), "--estimate"])
    assert shown.exit_code == 0, shown.output
    told = " ".join(shown.output.split())
    assert re.search(rf"the run writes about .{{1,20}}are free at .*{tmp_path.name}", told), told
    assert "name another `store`, or make room (`geb gc --delete`)" in told


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("def score(prompts, responses, references):\n    return 1 / 0\n", "ZeroDivisionError"),
        (
            "import os\nos.system('echo a program speaks')\nimport no_such_module\n",
            "No module named 'no_such_module'",
        ),
        ("def reward(*args):\n    return []\n", "has no function 'score'; it has: reward"),
        (
            "def score(prompts, responses, references):\n    return [1.0]\n",
            "returned 1 scores for 4 responses",
        ),
        (
            "def score(prompts, responses, references):\n    return [float('nan')] * 4\n",
            "returned score nan",
        ),
    ],
    ids=["raises", "import", "name", "count", "nan"],
)
@pytest.mark.parametrize("command", ["plan", "run"])
def test_an_oracle_that_cannot_work_is_refused_before_the_first_stage(
    tmp_path: Path, command: str, code: str, said: str
) -> None:
    oracle = tmp_path / "oracle.py"
    oracle.write_text(code)
    done = geb(command, write_config(tmp_path, inputs={"oracle_code": str(oracle)}))
    message = " ".join(done.stderr.split())
    assert done.returncode == 64, message
    assert said in message
    assert str(oracle) in message or "oracle.py:score" in message
    assert "remedy" in message
    assert not (tmp_path / "store/artifacts").exists()


def test_a_function_that_is_a_part_of_a_sum_is_tried_too(tmp_path: Path) -> None:
    oracle = tmp_path / "oracle.py"
    oracle.write_text("def score(prompts, responses, references):\n    return [1.0]\n")
    weighted = {"oracle": "weighted", "weighted": {"weights": {"python": 1, "math_verify": 1}}}
    config = write_config(tmp_path, inputs={"oracle_code": str(oracle)}, score=weighted)
    with pytest.raises(UserError, match=r"oracle\.py:score returned 1 scores for 4 responses"):
        try_oracle(load_config(config))


def test_an_oracle_that_is_tried_does_not_get_the_orchestrator_s_secrets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    oracle = tmp_path / "oracle.py"
    oracle.write_text(
        "import os\n"
        "def score(prompts, responses, references):\n"
        "    assert os.environ['GEB_TEST_OTHER'] == 'there'\n"
        "    assert 'PREFECT_API_KEY' not in os.environ\n"
        "    return [0.0] * len(responses)\n"
    )
    monkeypatch.setenv("GEB_TEST_OTHER", "there")
    monkeypatch.setenv("PREFECT_API_KEY", "secret")
    try_oracle(load_config(write_config(tmp_path, inputs={"oracle_code": str(oracle)})))


NEEDS_REFERENCES = (
    "def score(prompts, responses, references):\n"
    "    return [float(each.strip() == 'right') for each in references]\n"
)


@pytest.mark.parametrize("of", ["json", "folder", "structs", "columns", "hub"])
def test_an_oracle_that_needs_references_is_not_refused_for_a_trial_without(
    tmp_path: Path, of: str
) -> None:
    oracle = tmp_path / "oracle.py"
    oracle.write_text(NEEDS_REFERENCES)
    row = {"prompt": "What?", "reference_answer": "right", "found": {"answer": "right"}}
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "rows.jsonl").write_text(json.dumps(row) + "\n")
    (folder / "rows.json").write_text(json.dumps([row]))
    rows = folder / "rows.jsonl"
    prompts, prepare = {
        "json": (folder / "rows.json", {}),
        "folder": (folder, {}),
        "structs": (rows, {"reference_column": "found.answer"}),
        "columns": (rows, {"reference_columns": ["found"], "reference_column": "none"}),
        "hub": (f"owner/name@{'0' * 40}", {}),
    }[of]
    inputs = {"oracle_code": str(oracle), "prompts": [str(prompts)]}
    try_oracle(load_config(write_config(tmp_path, inputs=inputs, prepare=prepare)))
    oracle.write_text(NEEDS_REFERENCES.replace("return [", "return [0.0] + ["))
    if of in ("json", "folder"):
        with pytest.raises(UserError, match="returned 3 scores for 2 responses"):
            try_oracle(load_config(tmp_path / "small.yaml"))


def test_an_oracle_is_tried_on_a_prompt_of_its_own_where_none_is_named(tmp_path: Path) -> None:
    oracle = tmp_path / "oracle.py"
    oracle.write_text(
        "def score(prompts, responses, references):\n"
        "    assert str(prompts[0]).count('A trial prompt.') == 1\n"
        "    return [0.0] * len(responses)\n"
    )
    inputs = {"oracle_code": str(oracle), "prompts": []}
    try_oracle(load_config(write_config(tmp_path, inputs=inputs)))


HANGS = """
import os, subprocess, sys, time
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)  # {mark}"])
open({sign!r}, "w").close()
time.sleep(600)
"""


def test_an_oracle_that_hangs_in_its_trial_ends_with_the_orchestrator(tmp_path: Path) -> None:
    oracle, sign = tmp_path / "oracle.py", tmp_path / "started"
    oracle.write_text(HANGS.format(mark=tmp_path, sign=str(sign)))
    config = write_config(tmp_path, inputs={"oracle_code": str(oracle)})
    command = [sys.executable, "-m", "flows.commands.cli", "plan", str(config)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as plan:
        wait_until(sign.exists)
        below = psutil.Process(plan.pid).children(recursive=True)
        assert len(below) >= 3, "a supervisor, the trial, and what it has started"
        plan.kill()
    assert not psutil.wait_procs(below, timeout=60)[1]


def test_an_oracle_that_ends_its_process_is_refused(tmp_path: Path) -> None:
    oracle = tmp_path / "oracle.py"
    oracle.write_text("import os\ndef score(prompts, responses, references):\n    os._exit(0)\n")
    config = load_config(write_config(tmp_path, inputs={"oracle_code": str(oracle)}))
    with pytest.raises(UserError, match="ended the process that called it"):
        try_oracle(config)
