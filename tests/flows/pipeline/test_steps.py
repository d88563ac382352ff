"""Steps of a configuration, and the inputs of each; nothing is started."""

import json

import pytest

from flows.pipeline.algorithm import unread_steps
from flows.pipeline.loading import load_config
from stages.contract.errors import UserError
from stages.promote.params import PromoteParams
from tests.flows.loop import ROOT
from tests.flows.pipeline.test_iterations import steps_of
from tests.flows.planning.test_estimate import write_checkpoint

QUICKSTART = ROOT / "configs/quickstart.yaml"
JUDGE = "score={oracle: judge, judge: {mode: pairwise, model: j, url: http://x/v1}}"
VLLM = "generate.backend=vllm"

PAIR = '{"prompt": "one?", "chosen": "yes", "rejected": "no"}\n'
PARTS = ("generate", "score")

# Number of samples, temperature, top-p and most tokens, by the section that sets them.
SAMPLINGS = {
    "generate": (4, 0.11, 0.12, 13),
    "evaluation": (5, 0.21, 0.22, 23),
    "screen": (6, 0.6, 0.12, 13),
    "suites.other": (7, 0.41, 0.42, 43),
}


@pytest.mark.parametrize(
    ("place", "section"),
    [
        ("iteration-1", "generate"),
        ("iteration-2", "generate"),
        ("base", "evaluation"),
        ("iteration-1/evaluate", "evaluation"),
        ("screen/iteration-1", "screen"),
        ("base/suite-other", "suites.other"),
        ("iteration-2/evaluate/suite-other", "suites.other"),
    ],
)
def test_a_sampling_has_the_settings_of_its_own_section(place, section, tmp_path):
    names = ("num_samples", "temperature", "top_p", "max_new_tokens")
    sections = {"suites.other": "suites.other.evaluation"}
    overrides = [
        f"{sections.get(owner, owner)}.{name}={value}"
        for owner, values in SAMPLINGS.items()
        for name, value in zip(names, values, strict=True)
        if (owner, name) not in {("screen", name) for name in names[1:]}
    ]
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "one?"}\n')
    steps = steps_of(*overrides, f"suites.other.prompts={prompts}", "iterations=2")
    params = steps[f"{place}/generate/0"].params
    assert tuple(getattr(params, name) for name in names) == SAMPLINGS[section]


def measured_by(*overrides):
    [first, *_] = (
        step.params
        for step in unread_steps(load_config(QUICKSTART, list(overrides)))
        if isinstance(step.params, PromoteParams)
    )
    return first.measured_by


@pytest.mark.parametrize(
    ("override", "is_alike"),
    [
        ("seed=1", True),
        ("train.beta=0.3", True),
        ("generate.num_shards=2", True),
        ("generate.temperature=0.3", True),
        ("prepare.test_prompts=5", True),
        ("inputs.policy=/another/model", True),
        ("evaluation.num_samples=3", False),
        ("evaluation.temperature=0.3", False),
        ("inputs.oracle_code=/another/oracle.py", False),
        ("score.python.function=another", False),
        ("inputs.prompts=/other/prompts.jsonl", False),
        ("inputs.test_prompts=/other/prompts.jsonl", False),
        ("prepare.system_prompt=Be brief.", False),
        (JUDGE, False),
    ],
)
def test_figures_are_alike_by_oracle_sampling_and_source_of_prompts(override, is_alike):
    assert (measured_by() == measured_by(override)) is is_alike


@pytest.mark.parametrize(
    ("override", "is_alike"),
    [("seed=1", True), ("sft.epochs=9", True), ("inputs.policy=/another/model", False)],
)
def test_the_starting_policy_is_a_comparing_judge_s_base(override, is_alike):
    start = ("inputs.warm_start=null", "inputs.policy=/model")
    assert (measured_by(JUDGE, *start) == measured_by(JUDGE, *start, override)) is is_alike


@pytest.mark.parametrize("override", ["seed=1", "inputs.policy=/another/model", "sft.epochs=9"])
def test_figures_of_a_comparing_judge_are_alike_for_one_base(override):
    assert measured_by(JUDGE) == measured_by(JUDGE, "train.beta=0.3")
    assert measured_by(JUDGE) != measured_by(JUDGE, override)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["screen.num_samples=2", JUDGE], "cannot tell whether a prompt is solved"),
        (
            ["inputs.prompts=[a.jsonl, b.jsonl]", "iterations=3"],
            "names 2 sources, and iterations is 3: name one, which is split, or 3",
        ),
        (
            [VLLM, "generate.vllm.tensor_parallel_size=2"],
            "generate asks for 1 .* takes 2 .*, to 2",
        ),
        (
            [VLLM, "generate.vllm.tensor_parallel_size=8", "resources.generate.gpus=1"],
            "generate asks for 1 .* takes 8 .*, to 8",
        ),
        (
            [VLLM, "generate.vllm.tensor_parallel_size=2", "resources.generate.gpus=5"],
            "generate asks for 5 .*, to 2; generate.num_shards",
        ),
        (["resources.generate.gpus=8"], "generate asks for 8 .*, to 1; generate.num_shards"),
        (["resources.generate.nodes=2"], "only sft and train work on several nodes.*num_shards"),
        (["resources.score.gpus=2"], "score asks for 2 devices, and score takes 1"),
        (["resources.train.nodes=2", "store=s3://b/store"], "in a bucket: the nodes meet"),
        (["resources.train.nodes=2", "execution.runner=docker"], "runner docker starts one"),
    ],
)
def test_what_cannot_work_together_is_refused(overrides, message):
    with pytest.raises(UserError, match=message):
        load_config(QUICKSTART, overrides)


@pytest.mark.parametrize(
    "overrides",
    [
        [VLLM, "generate.vllm.tensor_parallel_size=8", "resources.generate.gpus=8"],
        [VLLM, "generate.vllm.tensor_parallel_size=2", "resources.generate.processes=2"],
        ["generate.vllm.tensor_parallel_size=8"],
        ["resources.train.nodes=2"],
        ["resources.train.nodes=2", "execution.runner=slurm"],
    ],
    ids=str,
)
def test_enough_gpus_and_nodes_that_can_meet_are_accepted(overrides):
    load_config(QUICKSTART, overrides)


def test_what_the_oracle_does_not_read_is_not_given_to_it(tmp_path):
    write_checkpoint(tmp_path, {"model_type": "llama"})

    def given(*overrides):
        step = steps_of("iterations=1", f"inputs.oracle_model={tmp_path}", *overrides)
        return step["iteration-1/score/0"].inputs.keys()

    assert given() == {"responses", "code"}
    assert given("score.oracle=urm_gated") == {"responses", "model"}
    assert given("score.oracle=math_verify") == {"responses"}
    judge = 'score={oracle: judge, judge: {url: "http://localhost", model: m}}'
    template = f"inputs.oracle_code={ROOT}/stages/score/judge.jinja"
    assert given(judge, template) == {"responses", "code"}
    weighted = "score={oracle: weighted, weighted: {weights: {%s}}}"
    assert given(weighted % "math_verify: 1, urm_gated: 1") == {"responses", "model"}
    assert given(weighted % "python: 1, reward_model: 1") == {"responses", "code", "model"}


def test_code_that_no_setting_reads_is_given_to_no_step(tmp_path):
    code = tmp_path / "code.py"
    code.write_text("")
    steps = steps_of(f"inputs.objective_code={code}", f"inputs.strategy_code={code}")
    assert "code" not in steps["iteration-1/train"].inputs
    assert "code" not in steps["iteration-1/pair"].inputs
    python = steps_of("train.objective=python", f"inputs.objective_code={code}")
    assert "code" in python["iteration-1/train"].inputs


def test_rendering_of_conversations_is_the_same_in_all_stages(tmp_path):
    chat = {"chat_template_args": {"enable_thinking": False}, "allow_control_tokens": True}
    given = [f"generate.{name}={json.dumps(value)}" for name, value in chat.items()]
    by_name = steps_of(*given, "iterations=1")
    for name in ("sft", "iteration-1/generate/0"):
        assert {field: getattr(by_name[name].params, field) for field in chat} == chat
    assert by_name["base/score/0"].params.allow_control_tokens
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text(PAIR)
    by_name = steps_of(*given, "iterations=1", f"inputs.preferences={pairs}")
    assert {field: getattr(by_name["iteration-1/pair"].params, field) for field in chat} == chat


def test_rows_without_a_preference_are_dropped_as_prepare_drops_rows(tmp_path):
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text('{"prompt": "one?", "chosen": "yes"}\n' + PAIR)
    steps = steps_of(f"inputs.preferences={pairs}", "prepare.invalid_rows=drop")
    assert steps["iteration-1/pair"].params.invalid_rows == "drop"


PREFERENCES = ("inputs.prompts=[]", "inputs.preferences=owner/pairs")
SPLIT = ("preferences.split=train_prefs", "preferences.subset=b")
OTHER_SPLIT = ("prepare.split=train_gen", "prepare.subset=a")


@pytest.mark.parametrize(
    ("overrides", "read"),
    [
        (SPLIT, ("train_prefs", "b")),
        ((*OTHER_SPLIT, *SPLIT), ("train_prefs", "b")),
        (("prepare.subset=a",), ("train", "a")),
        ((*OTHER_SPLIT, *SPLIT, "inputs.prompts=[owner/prompts]"), ("train_gen", "a")),
    ],
)
def test_prompts_of_preferences_are_read_from_their_split(overrides, read):
    first, *_ = unread_steps(load_config(QUICKSTART, [*PREFERENCES, *overrides]))
    assert (first.params.split, first.params.subset) == read


def test_figures_on_prompts_of_two_splits_of_preferences_differ():
    assert measured_by(*PREFERENCES) != measured_by(*PREFERENCES, "preferences.split=other")
