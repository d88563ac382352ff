"""Estimates: terms worked out by hand for Llama-3-8B and 70B, savings, and what cannot fit."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from flows.execution.plan import plan
from flows.pipeline.config import RunConfig
from flows.pipeline.loading import load_config
from flows.planning.cost import GIB, Cost
from flows.planning.estimate import Estimate, estimate, wall_seconds
from flows.planning.show import summary_line, to_json
from flows.planning.sizes import rows_of
from stages.contract.errors import UserError
from stages.contract.request import FileInput
from tests.flows.loop import ROOT, geb_ok

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
SMALL = LLAMA_8B | {
    "hidden_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "intermediate_size": 2816,
    "vocab_size": 16007,
}
PARAMS = {"8B": 8_030_261_248, "70B": 70_553_706_496}
SHAPES = {"8B": LLAMA_8B, "70B": LLAMA_70B, "small": SMALL}
PROMPTS = 3 * 1000 + 256
TRAIN, GENERATE = "iteration-1/train", "iteration-1/generate/0"


def write_checkpoint(folder: Path, config: dict[str, Any]) -> None:
    """As much of a checkpoint as a plan reads; its file of weights has none."""
    folder.mkdir(exist_ok=True)
    (folder / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "chat_template.jinja").write_text("")


def configured(folder: Path, size: str, *settings: str) -> RunConfig:
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
            # Trainings on several nodes have it.
            "resources.train.rendezvous=10.0.0.5:29500",
            *settings,
        ],
    )


def estimated(config: RunConfig) -> Estimate:
    return estimate(config, plan(config))


def cost(folder: Path, size: str, *settings: str, step: str = TRAIN) -> Cost:
    """Cost of one step of :func:`configured`."""
    found = estimated(configured(folder, size, *settings))
    return next(each.cost for each in found.steps if each.step == step)


@pytest.mark.parametrize(
    ("size", "gpus", "nodes"), [("8B", 8, 1), ("8B", 8, 2), ("70B", 8, 1), ("70B", 8, 2)]
)
def test_zero_3_splits_weights_gradients_and_optimizer(
    tmp_path: Path, size: str, gpus: int, nodes: int
) -> None:
    devices = (f"resources.train.gpus={gpus}", f"resources.train.nodes={nodes}")
    found = cost(tmp_path, size, *devices, "train.reference_logprobs=sampler")
    params, world, shape = PARAMS[size], gpus * nodes, SHAPES[size]
    sizes = ("hidden_size", "num_hidden_layers", "intermediate_size", "vocab_size")
    hidden, layers, wide, vocabulary = (shape[name] for name in sizes)
    tokens = 8192
    one_layer = 16 * hidden + 2 * (2 * hidden + 2 * 1024 + 4 * wide)
    expected = (
        # bfloat16; the float32 gradient of one sub-group of at most 1e9 weights at the step.
        2 * params / world,
        2 * params / world + 4 * min(1e9, params / world),
        # AdamW's two moments and the master weights, float32.
        12 * params / world,
        # The bucket, a copy with the shards of each process side by side, and gathered weights.
        2 * (5e8 + 5e8 + 1e9),
        # Each layer's input, one layer computed again, and the gradients of its widest tensors.
        tokens * (2 * layers * hidden + one_layer + 3 * 2 * wide),
        # Logits, the head's gradient and the runtime.
        2 * 4 * 1024 * vocabulary + 4 * vocabulary * hidden + 2 * GIB,
    )
    assert found.memory == pytest.approx(sum(expected))


def test_tokens_and_operations_of_a_training(tmp_path: Path) -> None:
    found = cost(tmp_path, "8B", "resources.train.gpus=8")
    # Packed: a prompt of 260 tokens once (1040 bytes of a line), two responses of 512.
    prompt = (len(json.dumps({"prompt": "x" * 1024})) + 1) / 4
    pair, responses = prompt + 2 * 512, 2 * 512
    # One pass of the reference and two epochs.
    assert found.tokens == pytest.approx(1000 * pair * 3)
    head = 128256 * 4096
    layers = PARAMS["8B"] - 2 * head - 4096
    forward = 1000 * 2 * (pair * layers + responses * head)
    assert found.flops == pytest.approx(forward * (1 + 2 * 3))


def test_adapters_hold_gradients_and_optimizer_of_their_own_alone(tmp_path: Path) -> None:
    off = ("train.deepspeed.zero_stage=off", "resources.train.gpus=1")
    low, high = (cost(tmp_path, "8B", *off, f"train.lora.rank={rank}") for rank in (16, 32))
    # r · (inputs + outputs) of q, k, v, o, gate, up, down: weight, gradient, two moments.
    adapters = 32 * 16 * (2 * (4096 + 4096) + 2 * (4096 + 1024) + 3 * (4096 + 14336))
    assert high.memory - low.memory == pytest.approx((2 + 2 + 8) * adapters)


# python -m benchmarks.planned_memory --processes 1 --lora 0 (docs/planning.md)
@pytest.mark.parametrize(("stage", "measured"), [("off", 1.76), ("2", 2.68), ("3", 3.62)])
def test_memory_on_a_cpu_is_what_was_measured(tmp_path: Path, stage: str, measured: float) -> None:
    on_cpu = ("resources.train.gpus=0", "train.micro_batch_tokens=64", "train.precision=auto")
    plain = ("train.gradient_checkpointing=false", f"train.deepspeed.zero_stage={stage}")
    found = cost(tmp_path, "small", *on_cpu, *plain)
    assert found.memory / 2**30 == pytest.approx(measured, rel=0.15)


def test_offload_moves_the_optimizer_to_the_host(tmp_path: Path) -> None:
    gpus, offload = "resources.train.gpus=8", "train.deepspeed.offload_optimizer"
    here, there = (cost(tmp_path, "70B", gpus, f"{offload}={each}") for each in ("false", "true"))
    assert here.memory - there.memory == pytest.approx(12 * PARAMS["70B"] / 8)


def test_what_does_not_fit_names_the_setting(tmp_path: Path) -> None:
    gpus = "resources.train.gpus=8"
    large = "\n".join(estimated(configured(tmp_path, "70B", gpus)).warnings)
    for said in (
        "train does not fit",
        "train.deepspeed.offload_optimizer=true",
        "generate.vllm.tensor_parallel_size",
        "evaluate.dtype=bfloat16",
    ):
        assert said in large
    assert "does not fit" not in "\n".join(estimated(configured(tmp_path, "8B", gpus)).warnings)


def test_vllm_keeps_what_the_weights_leave_for_keys_and_values(tmp_path: Path) -> None:
    found = cost(tmp_path, "8B", step=GENERATE)
    assert found.memory == pytest.approx(0.9 * 141e9)


def test_a_slower_gpu_takes_longer_and_money_follows(tmp_path: Path) -> None:
    price = "estimation.price_per_gpu_hour=2.5"
    fast = estimated(configured(tmp_path, "8B", price, "estimation.hardware=h200"))
    slow = estimated(configured(tmp_path, "8B", price, "estimation.hardware=a100-80gb"))
    assert slow.gpu_hours(cached=False) > 1.5 * fast.gpu_hours(cached=False)
    assert to_json(fast)["price"] == pytest.approx(2.5 * fast.gpu_hours(cached=False))


def test_what_the_store_has_counts_as_saved(tmp_path: Path) -> None:
    config = configured(tmp_path, "8B")
    lines = plan(config)
    whole = estimate(config, lines)
    cached = [
        dataclasses.replace(each, action="reuse") if each.stage == "score" else each
        for each in lines
    ]
    found = estimate(config, cached)
    scored = sum(each.gpu_hours for each in whole.steps if each.stage == "score")
    assert found.gpu_hours(cached=True) == pytest.approx(scored)
    assert found.gpu_hours(cached=False) == pytest.approx(whole.gpu_hours(cached=False) - scored)
    assert found.seconds < whole.seconds


def test_an_unknown_number_of_prompts_is_said(tmp_path: Path) -> None:
    config = configured(tmp_path, "8B", "estimation.prompts_per_iteration=null")
    hub = f"nobody/prompts@{'0' * 40}"
    config = config.model_copy(
        update={"inputs": config.inputs.model_copy(update={"prompts": (hub,)})}
    )
    assert any("estimation.prompts_per_iteration" in each for each in estimated(config).warnings)


def test_a_run_lasts_as_its_longest_chain_or_as_all_steps_at_a_time() -> None:
    seconds = {"a": 2.0, "b": 1.0, "c": 1.0, "d": 1.0}
    upstream = {"c": ["a"], "d": ["gone"]}
    assert wall_seconds(seconds, upstream, parallel=1) == 5
    assert wall_seconds(seconds, upstream, parallel=4) == 3
    assert wall_seconds({}, {}, parallel=2) == 0


def test_the_command_shows_steps_and_the_sum() -> None:
    done = geb_ok("plan", ROOT / "configs/quickstart.yaml", "--estimate")
    assert "iteration-3/train" in done.stdout
    assert "estimate: about" in done.stdout


def test_a_sum_that_lacks_steps_is_a_least_and_names_them(tmp_path: Path) -> None:
    oracle = tmp_path / "oracle"
    write_checkpoint(oracle, LLAMA_8B | {"model_type": "mamba"})
    config = configured(tmp_path, "8B", "iterations=1", f"inputs.oracle_model={oracle}")
    found = estimated(config)
    lacking = to_json(found)["steps_without_cost"]
    # A suite is scored by a rule, whose time is known to be short.
    scores = [each.step for each in found.steps if each.stage == "score"]
    assert lacking == [each for each in scores if "/suite-" not in each]
    assert len(lacking) > 4
    assert summary_line(found).startswith("estimate: at least ")
    assert summary_line(found).endswith(
        f", without {', '.join(lacking[:4])}, {len(lacking) - 4} more"
    )
    line = summary_line(estimated(configured(tmp_path, "8B", "iterations=1")))
    assert line.startswith("estimate: about ") and "without" not in line


@pytest.mark.parametrize(
    ("setting", "gpus", "said"),
    [
        ("tensor_parallel_size=3", 3, "32 attention heads"),
        ("extra_engine_args={pipeline_parallel_size: 48}", 48, "has 32 layers"),
        ("extra_engine_args={pipeline_parallel_size: two}", 1, "write an integer from 1 on"),
        ("extra_engine_args={pipeline_parallel_size: 0}", 1, "write an integer from 1 on"),
    ],
)
def test_an_engine_that_cannot_be_split_so_is_refused(
    tmp_path: Path, setting: str, gpus: int, said: str
) -> None:
    settings = (f"resources.generate.gpus={gpus}", f"generate.vllm.{setting}")
    with pytest.raises(UserError, match=said):
        plan(configured(tmp_path, "8B", *settings))


def test_rows_of_a_json_array_and_of_a_folder_count(tmp_path: Path) -> None:
    rows = [{"prompt": f"How much is {number}?"} for number in range(70)]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    for name in ("one", "empty"):
        (tmp_path / name).mkdir()
    for name, text in {
        "one/a.jsonl": lines,
        "one/b.jsonl": lines,
        "one/notes.json": "{}",
        "one/.hidden.jsonl": lines,
        "flat.json": json.dumps(rows),
        "tall.json": json.dumps(rows, indent=2),
        "none.json": "{}",
    }.items():
        (tmp_path / name).write_text(text)

    def counted(name: str) -> int | None:
        found = rows_of([FileInput(location=str(tmp_path / name), digest=name)])
        return None if found is None else found.number

    names = ("flat.json", "tall.json", "one", "none.json", "empty")
    assert [counted(name) for name in names] == [70, 70, 140, None, None]
