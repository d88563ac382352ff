"""Estimates: terms worked out by hand for Llama-3-8B and 70B, savings, and what cannot fit."""

import dataclasses
import json
import re
import shutil
from contextlib import ExitStack
from unittest import mock

import pytest

from flows.execution.plan import plan
from flows.execution.run_record import RunRecord
from flows.pipeline.algorithm import resolve_run
from flows.pipeline.loading import load_config
from flows.pipeline.steps import Steps
from flows.planning.estimate import estimate, measured_rates, wall_seconds
from flows.planning.show import cost_line
from flows.planning.sizes import rows_of
from stages.contract.request import FileInput
from stages.store.base import Store
from tests.flows.loop import ROOT, geb_json, geb_ok

# config.json of meta-llama/Meta-Llama-3-8B and 70B, as far as their sizes go.
LLAMA_8B = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "dtype": "bfloat16",
}
LLAMA_70B = LLAMA_8B | {
    "hidden_size": 8192,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "intermediate_size": 28672,
}
# Matrices: layers · (2·H·d·(heads + key heads) + 3·H·F) + 2·V·H.
PARAMS = {
    "8B": 32 * (2 * 4096 * 128 * 40 + 3 * 4096 * 14336) + 2 * 128256 * 4096,
    "70B": 80 * (2 * 8192 * 128 * 72 + 3 * 8192 * 28672) + 2 * 128256 * 8192,
}
SHAPES = {"8B": LLAMA_8B, "70B": LLAMA_70B}
PROMPTS = 3 * 1000 + 256
TRAIN, GENERATE = "iteration-1/train", "iteration-1/generate/0"


def write_checkpoint(folder, config):
    """As much of a checkpoint as a plan reads; its file of weights has none."""
    folder.mkdir(exist_ok=True)
    (folder / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "chat_template.jinja").write_text("")


def configured(folder, size, *settings):
    """The paper's first experiment with a policy of that size and 1000 prompts an iteration."""
    model = folder / f"llama-{size}"
    write_checkpoint(model, SHAPES[size])
    row = json.dumps({"prompt": "x" * 1024})
    (folder / "prompts.jsonl").write_text(f"{row}\n" * PROMPTS)
    places = {name: str(model) for name in ("policy", "oracle_model")}
    return load_config(
        ROOT / "configs/paper/llama3-geb-p-kl.yaml",
        [
            f"store={folder / 'store'}",
            *(f"inputs.{name}={place}" for name, place in places.items()),
            f"inputs.prompts=[{folder / 'prompts.jsonl'}]",
            "inputs.test_prompts=null",
            *settings,
        ],
    )


def estimated(config, rates=None):
    run = resolve_run(config)
    with ExitStack() as stack:
        if rates is not None:
            measured = mock.patch("flows.planning.estimate.measured_rates", return_value=rates)
            stack.enter_context(measured)
        return estimate(config, run.steps, plan(run))


def cost(folder, size, *settings, step=TRAIN):
    """Cost of one step of :func:`configured`."""
    costs = estimated(configured(folder, size, *settings)).steps
    return next(cost for cost in costs if cost.step == step)


# All in float32: weights, gradients, two moments and DeepSpeed's copy of the weights.
@pytest.mark.parametrize(
    ("size", "stage", "nodes", "bytes_of_parameter"),
    [
        ("8B", "off", 1, 4 + 4 + 8),
        ("8B", "1", 1, 4 + 4 + 12 / 8),
        ("8B", "2", 1, 4 + 4 / 8 + 12 / 8),
        ("8B", "3", 1, 16 / 8),
        ("70B", "3", 2, 16 / 16),
    ],
)
def test_each_stage_of_zero_splits_more(tmp_path, size, stage, nodes, bytes_of_parameter):
    devices = ("resources.train.gpus=8", f"resources.train.nodes={nodes}")
    work = cost(tmp_path, size, *devices, f"train.deepspeed.zero_stage={stage}")
    assert work.memory == pytest.approx(bytes_of_parameter * PARAMS[size])


def test_adapters_and_offload_leave_the_weights_alone(tmp_path):
    off = ("resources.train.gpus=1", "train.deepspeed.zero_stage=off", "train.lora.rank=16")
    assert cost(tmp_path, "8B", *off).memory == 2 * PARAMS["8B"]
    offload = ("resources.train.gpus=8", "train.deepspeed.offload_optimizer=true")
    assert cost(tmp_path, "70B", *offload).memory == (4 + 4) * PARAMS["70B"] / 8


def test_tokens_operations_and_time_of_a_training(tmp_path):
    step = cost(tmp_path, "8B", "resources.train.gpus=8", "estimation.hardware=h100")
    # A prompt of 260 tokens (1040 bytes of a line) counts once, two responses have 512 each.
    prompt = (len(json.dumps({"prompt": "x" * 1024})) + 1) / 4
    tokens = 1000 * (prompt + 2 * 512)
    # One pass of the reference and two epochs.
    assert step.tokens == pytest.approx(tokens * 3)
    operations = PARAMS["8B"] * tokens * (2 + 2 * 6)
    assert step.operations == pytest.approx(operations)
    assert step.seconds == pytest.approx(2 + operations / (8 * 989e12 * 0.25))
    assert step.gpu_hours == pytest.approx(8 * (step.seconds or 0) / 3600)


def test_tokens_and_memory_of_sampling_and_of_log_pi_ref(tmp_path):
    config = configured(tmp_path, "8B")
    steps = {step.step: step for step in estimated(config).steps}
    prompt = (len(json.dumps({"prompt": "x" * 1024})) + 1) / 4
    answered = 1000 / config.generate.num_shards * config.generate.num_samples
    assert steps[GENERATE].tokens == pytest.approx(answered * (prompt + 512))
    assert steps[GENERATE].memory == 2 * PARAMS["8B"]
    assert steps["iteration-1/score/0"].tokens == steps[GENERATE].tokens
    halves = ("generate.vllm.tensor_parallel_size=2", "resources.generate.gpus=2")
    assert cost(tmp_path, "8B", *halves, step=GENERATE).memory == PARAMS["8B"]
    sampling = Steps(config, {"": {}}).for_evaluation().params
    # log π_ref of the policy's responses alone is asked for.
    held_out = 256 * sampling.num_samples
    evaluated = steps["iteration-1/evaluate"]
    assert evaluated.tokens == pytest.approx(held_out * (prompt + sampling.max_new_tokens / 4))
    assert evaluated.operations == pytest.approx(2 * PARAMS["8B"] * evaluated.tokens)


def test_what_does_not_fit_names_the_setting_and_gpus_have_hours(tmp_path):
    gpus = "resources.train.gpus=8"
    costs = estimated(configured(tmp_path, "70B", gpus))
    assert " GPU-hours" in cost_line(costs)
    large = "\n".join(costs.warnings)
    for text in (
        f"train does not fit: its parameters take {16 * PARAMS['70B'] / 8e9:.1f} GB",
        "80% of the h200's 141 GB",
        "offload_optimizer=true",
        "generate.vllm.tensor_parallel_size",
        "evaluate.dtype=bfloat16",
    ):
        assert text in large
    assert "does not fit" not in "\n".join(estimated(configured(tmp_path, "8B", gpus)).warnings)


def test_steps_of_the_store_cost_nothing(tmp_path):
    config = configured(tmp_path, "8B")
    run = resolve_run(config)
    lines = plan(run)
    whole = estimate(config, run.steps, lines)
    cached = [
        dataclasses.replace(line, action="reuse") if line.stage == "score" else line
        for line in lines
    ]
    partial = estimate(config, run.steps, cached)
    assert {step.stage for step in whole.lacking} - {step.stage for step in partial.lacking} == {
        "score"
    }
    assert partial.seconds < whole.seconds


def test_an_unknown_number_of_prompts_leaves_the_time_open(tmp_path):
    config = configured(tmp_path, "8B", "estimation.prompts_per_iteration=null")
    hub = f"nobody/prompts@{'0' * 40}"
    config = config.model_copy(
        update={"inputs": config.inputs.model_copy(update={"prompts": (hub,)})}
    )
    costs = estimated(config)
    assert any("estimation.prompts_per_iteration" in text for text in costs.warnings)
    assert {step.seconds for step in costs.steps if step.stage == "train"} == {None}


def test_a_run_lasts_as_its_longest_chain_or_as_all_steps_at_a_time():
    seconds = {"a": 2.0, "b": 1.0, "c": 1.0, "d": 1.0}
    upstream = {"a": [], "b": [], "c": ["a"], "d": ["in the store"]}
    assert wall_seconds(seconds, upstream, parallel=1) == 5
    assert wall_seconds(seconds, upstream, parallel=4) == 3
    assert wall_seconds({}, {}, parallel=2) == 0


def test_rates_of_the_last_runs_replace_the_formula(copied):
    """The next iteration of a run is as fast, token by token, as the one before."""
    store = Store.in_folder(str(copied.parent / "store"))
    longer = load_config(copied, ["iterations=2"])
    steps = {step.step: step for step in estimated(longer).steps}
    record = RunRecord(store, "small").step(TRAIN)
    manifest = store.manifest("train", record.key)
    last = steps["iteration-2/train"]
    assert last.measured
    tokens = steps[TRAIN].tokens
    # An iteration has as many prompts as before.
    assert last.seconds == pytest.approx(manifest.seconds * last.tokens / tokens)
    rates = measured_rates(store)
    # A trial of the same model: its start-up is most of its time.
    small = store.run_path("small")
    shutil.copytree(small, small.with_name("trial"))
    halved = ["name=trial", "train.epochs=1"]
    RunRecord(store, "trial").save_config(load_config(copied, halved))
    assert measured_rates(store) == rates
    line = cost_line(estimated(longer))
    assert re.search(r"\d+ of \d+ steps by measured rates$", line)
    other = load_config(copied, ["sft.architecture.hidden_size=64"])
    assert not any(step.measured for step in estimated(other, rates).steps if step.params), (
        "a model of another size"
    )


def is_measured(config):
    return next(step.measured for step in estimated(config).steps if step.step == TRAIN)


def test_a_rate_holds_for_its_engine_and_devices_only(copied, monkeypatch):
    config = load_config(copied)
    assert is_measured(config)
    assert not is_measured(load_config(copied, ["train.precision=bfloat16"]))
    assert not is_measured(load_config(copied, ["train.deepspeed.zero_stage=1"]))
    assert not is_measured(load_config(copied, ["resources.train.gpus=1"]))
    store = Store.in_folder(str(copied.parent / "store"))
    with monkeypatch.context() as patch:
        patch.setattr("socket.gethostname", lambda: "elsewhere")
        assert measured_rates(store) == {}
    record = RunRecord(store, "small")
    trained = record.step(TRAIN)
    record.save_step(trained.model_copy(update={"state": "reused"}))
    assert not is_measured(config), "an earlier attempt may have had other devices"


@pytest.mark.parametrize(
    ("accelerator", "name"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
        ("NVIDIA A100 80GB PCIe", "a100-80gb"),
        ("NVIDIA GH200 480GB", None),
        ("cpu", None),
    ],
)
def test_a_rate_of_gpus_is_the_accelerator_s(copied, monkeypatch, accelerator, name):
    read = Store.manifest

    def manifest(store, stage, key):
        return read(store, stage, key).model_copy(update={"accelerator": accelerator})

    monkeypatch.setattr(Store, "manifest", manifest)
    store = Store.in_folder(str(copied.parent / "store"))
    on_gpus = load_config(copied, ["resources.train.gpus=2"])
    RunRecord(store, "small").save_config(on_gpus)
    devices = [kind.device.name for kind in measured_rates(store) if kind.stage == "train"]
    assert devices == ([name] if name else [])


def test_a_run_on_record_without_prompts_has_no_rates(copied):
    store = Store.in_folder(str(copied.parent / "store"))
    rates = measured_rates(store)
    RunRecord(store, "empty").save_config(load_config(copied, ["name=empty", "inputs.prompts=[]"]))
    assert measured_rates(store) == rates


def test_the_command_shows_steps_their_cost_and_the_sum(tmp_path):
    quickstart = (ROOT / "configs/quickstart.yaml", "--set", f"store={tmp_path}")
    done = geb_ok("plan", *quickstart)
    assert "iteration-3/train" in done.stdout
    assert re.search(r"estimate: [\d,]+ tokens, about ", done.stdout)
    lines = geb_json("plan", *quickstart)
    [train] = [line for line in lines if line["step"] == "iteration-3/train"]
    assert train["action"] == "run"
    assert train["tokens"] > 0


def test_a_sum_that_lacks_steps_is_a_least_and_names_their_stages(tmp_path):
    oracle = tmp_path / "oracle"
    write_checkpoint(oracle, LLAMA_8B | {"num_local_experts": 8})
    alone = ("iterations=1", "suites={}")
    costs = estimated(configured(tmp_path, "8B", *alone, f"inputs.oracle_model={oracle}"))
    lacking = [step.step for step in costs.steps if step.seconds is None]
    assert lacking == [step.step for step in costs.steps if step.stage == "score"]
    assert re.search(" tokens, at least .*, without score$", cost_line(costs))
    line = cost_line(estimated(configured(tmp_path, "8B", *alone)))
    assert ", about " in line
    assert "without" not in line
    # The prompts of its suites are on the hub.
    costs = estimated(configured(tmp_path, "8B", "iterations=1"))
    assert any("prepare are not on this machine" in text for text in costs.warnings)
    assert cost_line(costs).endswith(", without generate, evaluate")


def test_rows_of_a_json_array_and_of_a_folder_count(tmp_path):
    rows = [{"prompt": f"How much is {number}?"} for number in range(70)]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    for name in ("one", "empty"):
        (tmp_path / name).mkdir()
    for name, text in {
        "one/a.jsonl": lines,
        "one/b.jsonl": lines.replace("\n", "\n\n"),
        "one/notes.json": "{}",
        "one/.hidden.jsonl": lines,
        "flat.json": json.dumps(rows),
        "tall.json": json.dumps(rows, indent=2),
        "none.json": "{}",
    }.items():
        (tmp_path / name).write_text(text)

    def counted(name):
        rows = rows_of([FileInput(location=str(tmp_path / name), digest=name)])
        return None if rows is None else rows.number

    names = ("flat.json", "tall.json", "one", "none.json", "empty")
    assert [counted(name) for name in names] == [70, 70, 140, None, None]


def test_a_server_next_to_a_reward_model_leaves_the_time_open(tmp_path):
    settings = (
        "score.oracle=weighted",
        "score.weighted={weights: {reward_model: 1, http: 1}}",
        "score.http={url: 'http://host', identity: judge}",
    )
    score = cost(tmp_path, "8B", *settings, step="iteration-1/score/0")
    assert score.seconds is None
