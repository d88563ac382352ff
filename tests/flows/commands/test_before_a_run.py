"""Words of `geb plan` and `geb run` before the first stage: cautions, an oracle that fails."""

import json
import sys

import psutil
import pytest

from flows.execution.trial import try_own_code
from flows.pipeline.algorithm import unread_steps
from flows.pipeline.config import RunConfig
from flows.pipeline.loading import load_config
from flows.planning.cautions import cautions
from stages.contract.errors import UserError
from tests.flows.loop import ROOT, geb_ok, geb_refused, started, write_config
from tests.flows.probes import wait_until
from tests.stage_calls import write_jsonl

SCORE = "def score(prompts, responses, references):\n"


def with_oracle(folder, code, **changes):
    """A configuration with a Python oracle of this code, in the file `oracle.py`."""
    oracle = folder / "oracle.py"
    oracle.write_text(code)
    inputs = {"oracle_code": str(oracle)} | changes.pop("inputs", {})
    return write_config(folder, inputs=inputs, **changes)


def said_of(folder, rows, test=None, **changes):
    """Cautions about a configuration with a number of prompts."""
    prompts = write_jsonl(folder / "prompts.jsonl", [{"prompt": f"{n}?"} for n in range(rows)])
    inputs = {"prompts": [str(prompts)], "test_prompts": test and str(test)}
    inputs |= changes.pop("inputs", {})
    values = {"inputs": inputs, "iterations": 1} | changes
    config = RunConfig.model_validate(values)
    return list(cautions(config, unread_steps(config)))


def test_cautions_name_few_steps_small_moves_and_few_test_prompts(tmp_path):
    [steps, move, prompts] = said_of(tmp_path, 137, prepare={"test_prompts": 16})
    assert "2 steps in an iteration: at most 121 pairs in batches of 256, 2 epochs" in steps
    assert "Lower train.global_batch_pairs" in steps
    assert "train.learning_rate is 5e-07" in move
    assert "16 held-out prompts" in prompts
    assert "±24 points" in prompts
    train = {"global_batch_pairs": 32, "learning_rate": 1e-5}
    assert said_of(tmp_path, 1000, train=train) == []


def test_a_caution_names_responses_that_training_cuts(tmp_path):
    enough = {"train": {"global_batch_pairs": 32, "learning_rate": 1e-5}}
    [caution] = said_of(tmp_path, 1000, generate={"max_new_tokens": 8192}, **enough)
    assert "up to 8192" in caution and "Raise train.max_length_tokens" in caution


def test_a_caution_names_code_that_no_setting_reads(tmp_path):
    enough = {"train": {"global_batch_pairs": 32, "learning_rate": 1e-5}}
    inputs = {"objective_code": "loss.py", "strategy_code": "choice.py"}
    loss, choice = said_of(tmp_path, 1000, inputs=inputs, **enough)
    assert "inputs.objective_code" in loss and "train.objective is geb" in loss
    assert "inputs.strategy_code" in choice and "pair.strategy is best_worst" in choice
    used = enough | {"pair": {"strategy": "python"}}
    assert len(said_of(tmp_path, 1000, inputs=inputs, **used)) == 1


def test_a_prompt_longer_than_a_command_line_is_left_to_the_stage(tmp_path):
    prompts = write_jsonl(tmp_path / "long.jsonl", [{"prompt": "long" * 100_000}])
    code = f"{SCORE}    return [0.0] * len(prompts)\n"
    config = load_config(with_oracle(tmp_path, code, inputs={"prompts": [str(prompts)]}))
    try_own_code(config, {"score"})


def test_plan_warns_beside_its_document(tmp_path):
    done = geb_ok("plan", write_config(tmp_path), "--json")
    assert "warning train takes 4 steps" in " ".join(done.stderr.split())
    assert json.loads(done.stdout)


def test_gpus_of_a_stage_outside_the_run_are_not_needed(tmp_path):
    done = geb_ok(
        *("plan", write_config(tmp_path), "--set", "resources.preferences.gpus=8"), GEB_GPUS="0"
    )
    assert "would be refused" not in done.stderr


def test_plan_for_another_host_warns_that_this_one_lacks_gpus(tmp_path):
    gpus = ("--set", "resources.train.gpus=2")
    done = geb_ok("plan", write_config(tmp_path), *gpus, GEB_GPUS="0")
    assert "a run here would be refused: " in " ".join(done.stderr.split())
    assert "this host has 1" in " ".join(done.stderr.split())


@pytest.mark.parametrize("interpreters", [{}, {"generate": sys.executable}])
def test_vllm_is_missed_before_the_first_stage(tmp_path, interpreters):
    config = write_config(tmp_path, execution={"interpreters": interpreters})
    assert "needs vLLM" in geb_refused("run", config, "--set", "generate.backend=vllm")


WEIGHTED = {"oracle": "weighted", "weighted": {"weights": {"python": 1, "math_verify": 1}}}


@pytest.mark.parametrize(
    ("code", "said", "score"),
    [
        (
            "import os\nos.system('echo a program speaks')\nimport no_such_module\n",
            "No module named 'no_such_module'",
            {"oracle": "python"},
        ),
        (
            "def reward(*args):\n    return []\n",
            "has no function 'score'; it has: reward",
            {"oracle": "python"},
        ),
        (
            f"import os\n{SCORE}    os._exit(0)\n",
            "ended its process with exit code 0",
            {"oracle": "python"},
        ),
        (f"{SCORE}    return [1.0]\n", "oracle.py:score returned 1 scores for 4", WEIGHTED),
    ],
    ids=["import", "name", "exit", "part of a sum"],
)
def test_an_oracle_that_cannot_work_is_refused(tmp_path, code, said, score):
    with pytest.raises(UserError) as refused:
        try_own_code(load_config(with_oracle(tmp_path, code, score=score)))
    assert said in refused.value.message
    assert refused.value.remedy


def test_the_oracle_of_a_suite_is_tried_on_the_suite_s_prompts(tmp_path):
    row = {"prompt": "What?", "answer": "right"}
    prompts = write_jsonl(tmp_path / "own.jsonl", [row])
    code = tmp_path / "own.py"
    code.write_text(NEEDS_REFERENCES)
    suite = {"prompts": str(prompts), "prepare": {"reference_column": "answer"}}
    suite |= {"score": {"oracle": "python"}, "oracle_code": str(code)}
    failing = f"{SCORE}    return 1 / 0\n"
    config = load_config(with_oracle(tmp_path, failing, suites={"own": suite})).for_suite("own")
    try_own_code(config, {"score"})
    code.write_text(NEEDS_REFERENCES.replace("return [", "return [0.0] + ["))
    with pytest.raises(UserError, match=r"own\.py:score returned 3 scores for 2 responses"):
        try_own_code(config, {"score"})


@pytest.mark.parametrize("prompts", ["own", "the run's"])
def test_the_oracle_of_a_suite_is_tried_before_the_run(tmp_path, prompts):
    write_jsonl(tmp_path / "prompts.jsonl", [{"prompt": "What?", "reference_answer": "right"}])
    code = tmp_path / "own.py"
    code.write_text(NEEDS_REFERENCES)
    suite = {"score": {"oracle": "python"}, "oracle_code": str(code)}
    inputs = {"prompts": [str(tmp_path / "prompts.jsonl")]}
    if prompts == "own":
        suite["prompts"] = str(tmp_path / "prompts.jsonl")
        inputs = {}
    works = f"{SCORE}    return [0.0] * len(responses)\n"
    config = load_config(with_oracle(tmp_path, works, inputs=inputs, suites={"own": suite}))
    try_own_code(config)
    code.write_text(NEEDS_REFERENCES.replace("return [", "return [0.0] + ["))
    with pytest.raises(UserError, match=r"own\.py:score returned 3 scores for 2 responses"):
        try_own_code(config)


def test_a_tried_oracle_does_not_get_the_orchestrator_s_secrets(tmp_path, monkeypatch):
    code = (
        f"import os\n{SCORE}"
        "    assert os.environ['GEB_TEST_OTHER'] == 'there'\n"
        "    assert 'PREFECT_API_KEY' not in os.environ\n"
        "    return [0.0] * len(responses)\n"
    )
    monkeypatch.setenv("GEB_TEST_OTHER", "there")
    monkeypatch.setenv("PREFECT_API_KEY", "secret")
    try_own_code(load_config(with_oracle(tmp_path, code)))


OWN_CODE = {
    "oracle": ("score", "oracle", SCORE),
    "objective": ("train", "objective", "def objective(chosen, rejected):\n"),
    "strategy": ("pair", "strategy", "def select(responses, seed):\n"),
}


@pytest.mark.parametrize(
    ("command", "kind"), [("run", "oracle"), *(("plan", kind) for kind in OWN_CODE)]
)
def test_failing_user_code_is_refused_before_the_first_stage(tmp_path, command, kind):
    section, field, head = OWN_CODE[kind]
    code = tmp_path / "own.py"
    code.write_text(f"{head}    return 1 / 0\n")
    inputs = {f"{kind}_code": str(code)}
    config = write_config(tmp_path, inputs=inputs, **{section: {field: "python"}})
    refusal = geb_refused(command, config)
    assert "was tried before the run" in refusal
    assert "ZeroDivisionError: division by zero (line 2 of own.py)" in refusal
    assert not (tmp_path / "store/artifacts").exists()


@pytest.mark.parametrize("strategy", ["delta_ucb", "drts", "thompson"])
def test_a_strategy_is_tried_that_reads_components(tmp_path, strategy):
    inputs = {"strategy_code": str(ROOT / "examples/strategies/uncertain.py")}
    python = {"function": strategy, "settings": {"heads": "one two"}}
    pair = {"strategy": "python", "python": python}
    try_own_code(load_config(write_config(tmp_path, inputs=inputs, pair=pair)), {"pair"})


NEEDS_REFERENCES = f"{SCORE}    return [float(each.strip() == 'right') for each in references]\n"


@pytest.mark.parametrize("of", ["folder", "structs", "columns", "hub"])
def test_a_trial_gives_an_oracle_the_references_that_it_needs(tmp_path, of):
    row = {"prompt": "What?", "reference_answer": "right", "found": {"answer": "right"}}
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "rows.jsonl").write_text(json.dumps(row) + "\n")
    rows = folder / "rows.jsonl"
    prompts, prepare = {
        "folder": (folder, {}),
        "structs": (rows, {"reference_column": "found.answer"}),
        "columns": (rows, {"reference_columns": ["found"], "reference_column": "none"}),
        "hub": (f"owner/name@{'0' * 40}", {}),
    }[of]
    inputs = {"prompts": [str(prompts)]}
    config = with_oracle(tmp_path, NEEDS_REFERENCES, inputs=inputs, prepare=prepare)
    try_own_code(load_config(config))
    (tmp_path / "oracle.py").write_text(NEEDS_REFERENCES.replace("return [", "return [0.0] + ["))
    if of != "hub":
        with pytest.raises(UserError, match="returned 3 scores for 2 responses"):
            try_own_code(load_config(config))


HANGS = """
import os, subprocess, sys, time
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)  # {mark}"])
open({sign!r}, "w").close()
time.sleep(600)
"""


def test_a_trial_that_takes_too_long_is_left_to_the_stage(tmp_path, monkeypatch):
    monkeypatch.setattr("flows.execution.trial._LIMIT_SECONDS", 0.1)
    hangs = f"import time\n{SCORE}    time.sleep(600)\n"
    try_own_code(load_config(with_oracle(tmp_path, hangs)))


def test_a_hanging_trial_ends_with_the_orchestrator(tmp_path):
    sign = tmp_path / "started"
    config = with_oracle(tmp_path, HANGS.format(mark=tmp_path, sign=str(sign)))
    with started("plan", config) as plan:
        wait_until(sign.exists)
        below = psutil.Process(plan.pid).children(recursive=True)
        assert len(below) >= 3, "a supervisor, the trial, and what it has started"
        plan.kill()
    assert not psutil.wait_procs(below, timeout=60)[1]


def test_an_oracle_s_message_of_megabytes_is_cut(tmp_path):
    oracle = f"{SCORE}    raise ValueError('x' * 5_000_000)\n"
    refusal = geb_refused("plan", with_oracle(tmp_path, oracle, score={"oracle": "python"}))
    assert len(refusal) < 4500
    assert "fix the function" in refusal
