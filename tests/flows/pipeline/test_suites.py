"""Suites: further evaluations than that on the held-out prompts, each with other artifacts."""

import json
from pathlib import Path

import pytest

from flows.evaluate import resolve_comparison
from flows.pipeline.algorithm import resolve_run
from flows.pipeline.inputs import ComparedModels
from flows.pipeline.loading import check_config, load_config, load_overridden
from flows.report.summary import Summary, suite_rows
from stages.contract.errors import UserError
from tests.flows.loop import (
    ROOT,
    geb,
    geb_json,
    geb_ok,
    plan,
    steps,
    warm_started,
    write_config,
)
from tests.flows.report.evaluations import write_evaluation
from tests.stage_calls import write_jsonl
from tests.tiny_models import make_tiny_llama, make_tiny_reward_model

QUICKSTART = ROOT / "configs/quickstart.yaml"
PROMPTS = str(ROOT / "data/quickstart/prompts.jsonl")
EACH = {
    "prompts": PROMPTS,
    "evaluation": {"num_samples": 4, "max_new_tokens": 16},
    "after": "each",
}


def steps_of(**changes):
    config = load_overridden(QUICKSTART, {"iterations": 2, **changes}, (), "test")
    return {step.name: step for step in resolve_run(config).steps}


def test_a_suite_s_reward_model_without_a_chat_template_is_refused(tmp_path):
    model = make_tiny_reward_model(tmp_path / "model", chat_template=None)
    suite = {"prompts": PROMPTS, "score": {"oracle": "reward_model"}, "oracle_model": str(model)}
    with pytest.raises(UserError, match=r"^suites\.front\.oracle_model: .* has no chat template"):
        steps_of(suites={"front": suite})


@pytest.mark.parametrize(
    ("score", "code", "part"),
    [
        ({"oracle": "math_verify"}, None, "needs reference answers"),
        ({"oracle": "judge", "judge": {"url": "http://j/v1", "model": "m"}}, "{{ prompt }}", "not"),
    ],
    ids=["references", "template"],
)
def test_an_evaluation_s_data_and_template_are_read_first(tmp_path, score, code, part):
    prompts = write_jsonl(tmp_path / "prompts.jsonl", [{"prompt": f"{n}?"} for n in range(9)])
    suite = {"prompts": str(prompts), "score": score}
    if code is not None:
        template = tmp_path / "judge.jinja"
        template.write_text(code)
        suite["oracle_code"] = str(template)
    model = str(make_tiny_llama(tmp_path / "model"))
    store = str(tmp_path / "store")
    config = load_overridden(QUICKSTART, {"store": store, "suites": {"own": suite}}, (), "test")
    with pytest.raises(UserError, match=part):
        resolve_comparison(config, ComparedModels(model, model, "own"))


def test_a_suite_without_a_sampling_of_its_own_has_the_run_s():
    evaluation = {"num_samples": 6, "temperature": 0.3, "top_p": 0.8, "max_new_tokens": 9}
    suite = {"prompts": PROMPTS, "score": {"oracle": "math_verify"}}
    step = steps_of(suites={"math": suite}, evaluation=evaluation)["base/suite-math/generate/0"]
    assert step.params.model_dump(include={*evaluation}) == evaluation


def test_runs_of_every_seed_share_the_base_s_samples():
    one, two = (steps_of(seed=seed, suites={"front": EACH}) for seed in (0, 1))
    for name in ("prepare", "generate/0", "score/0"):
        assert one[f"base/suite-front/{name}"] == two[f"base/suite-front/{name}"]
    assert one["base/generate/0"].seed != two["base/generate/0"].seed


def test_a_suite_is_stored_whole_with_paths_from_its_file(tmp_path):
    (tmp_path / "own.jsonl").write_text('{"prompt": "What is 2 + 2?"}\n')
    path = tmp_path / "mine.yaml"
    path.write_text(f"extends: {QUICKSTART}\nsuites: {{own: {{prompts: own.jsonl}}}}\n")
    config = load_config(path, ["suites.own.evaluation.num_samples=3"])
    assert config.suites["own"].prompts == str(tmp_path / "own.jsonl")
    assert config.for_suite("own").evaluation.num_samples == 3
    again = check_config(json.loads(config.to_json()), "stored")
    assert again.model_dump() == config.model_dump()


def test_a_suite_of_the_run_s_samples_reads_back():
    suite = {"score": {"oracle": "math_verify"}, "evaluation": {"correct_from": 1}}
    config = load_overridden(QUICKSTART, {"suites": {"gold": suite}}, (), "test")
    again = check_config(json.loads(config.to_json()), "stored")
    assert again.for_suite("gold").evaluation == config.for_suite("gold").evaluation
    assert again.for_suite("gold").evaluation.correct_from == 1


def test_a_suite_s_table_has_the_base_and_its_iterations(tmp_path):
    config = load_overridden(QUICKSTART, {"suites": {"front": EACH}}, (), "test")
    policy, base = {"a": [1.0, 1.0], "b": [1.0, 0.0]}, {"a": [0.0, 1.0], "b": [0.0, 0.0]}
    metrics = {"mean_reward": 0.75, "base_mean_reward": 0.25, "win_rate": 1.0, "tied_prompts": 0}
    metrics |= {"mean_log_pi": -3.0, "mean_log_pi_ref": -4.5, "base_mean_log_pi": -2.0}
    metrics |= {"base_mean_log_pi_ref": -2.0}
    place = "iteration-3/evaluate/suite-front"
    style = {
        "policy": {"components.style": {"a": (1.0, 1)}},
        "base": {"components.style": {"a": (0.0, 1)}},
    }
    written = write_evaluation(tmp_path / "evaluated", policy, base, metrics, (2,), style)
    summary = Summary("run", config, "store", artifacts={place: written})
    rows = suite_rows(summary, "front")
    assert [row.iteration for row in rows] == [0, 3]
    names = ("mean_reward", "kl_to_base", "accuracy", "pass@2", "components.style")
    assert [[row.values.get(name) for name in names] for row in rows] == [
        [0.25, None, 0.25, 0.5, 0.0],
        [0.75, 1.5, 0.75, 1.0, 1.0],
    ]
    assert "mean_log_pi" not in rows[0].figures
    assert rows[1].figures["win_rate"].interval is not None
    assert suite_rows(Summary("run", config, "store"), "front") == []


@pytest.mark.slow
def test_a_run_with_suites_and_a_suite_on_any_checkpoint(finished, tmp_path):
    lines = Path(PROMPTS).read_text().splitlines()[:4]
    prompt_file = tmp_path / "own.jsonl"
    prompt_file.write_text("\n".join(lines) + "\n")
    sampling = {"num_samples": 2, "max_new_tokens": 16, "correct_from": 0.5}
    suite = {"prompts": str(prompt_file), "evaluation": sampling | {"pass_at_k": [1, 2]}}
    math = {
        "prompts": str(prompt_file),
        "evaluation": sampling,
        "score": {"oracle": "math_verify", "max_null_share": 1.0},
    }
    store = finished.parent / "store"
    config = write_config(
        tmp_path,
        store=str(store),
        name="with-suites",
        inputs=warm_started(finished),
        suites={"own": suite, "math": math},
    )
    [base, row] = geb_json("run", config)["suites"]["own"]
    assert base["iteration"] == 0
    figures = row["figures"]
    assert figures["mean_reward"]["low"] <= figures["mean_reward"]["value"]
    assert {"accuracy", "pass@1", "pass@2"} <= set(figures)
    assert figures["pass@1"]["value"] == pytest.approx(figures["accuracy"]["value"])
    assert {"base/suite-own/generate/0", "iteration-1/evaluate/suite-own"} <= steps(
        store, "with-suites"
    ).keys()
    assert {step["action"] for step in plan(config).values()} == {"reuse"}
    shown = geb("report", "with-suites", "--store", store)
    assert "suite own" in shown.stdout
    page = (store / "runs/with-suites/report.html").read_text()
    assert "Suite own" in page
    again = geb_ok("evaluate", config, "with-suites:1", "--suite", "own", "--json")
    assert "policy/generate/0 cached" in " ".join(again.stderr.split()), "of the run's own suite"
