"""Estimates: terms worked out by hand for Llama-3-8B and 70B, savings, and what cannot fit."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from flows.execution.plan import plan
from flows.pipeline.config import RunConfig
from flows.pipeline.loading import load_config
from flows.planning.cost import GIB, this_cpu
from flows.planning.estimate import Estimate, StepEstimate, estimate, wall_seconds
from flows.planning.show import to_json
from flows.planning.sizes import rows_of
from stages.contract.errors import UserError
from stages.contract.request import FileInput
from tests.flows.loop import ROOT, geb

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
PARAMS = {"8B": 8_030_261_248, "70B": 70_553_706_496}
SHAPES = {"8B": LLAMA_8B, "70B": LLAMA_70B}
PROMPTS = 3 * 1000 + 256


def configured(folder: Path, size: str, *settings: str) -> RunConfig:
    """The paper's first experiment with a policy of that size and 1000 prompts an iteration."""
    model = folder / f"llama-{size}"
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text(json.dumps(SHAPES[size]))
    (model / "chat_template.jinja").write_text("")
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
            # Of trainings on several nodes.
            "resources.train.rendezvous=10.0.0.5:29500",
            *settings,
        ],
    )


def estimated(config: RunConfig) -> Estimate:
    return estimate(config, plan(config))


def step(found: Estimate, name: str) -> StepEstimate:
    return next(each for each in found.steps if each.step == name)


@pytest.mark.parametrize(
    ("size", "gpus", "nodes"), [("8B", 8, 1), ("8B", 8, 2), ("70B", 8, 1), ("70B", 8, 2)]
)
def test_zero_3_splits_weights_gradients_and_optimizer(
    tmp_path: Path, size: str, gpus: int, nodes: int
) -> None:
    config = configured(
        tmp_path,
        size,
        f"resources.train.gpus={gpus}",
        f"resources.train.nodes={nodes}",
        "train.reference_logprobs=sampler",
    )
    found = step(estimated(config), "iteration-1/train")
    params, world, shape = PARAMS[size], gpus * nodes, SHAPES[size]
    hidden, layers, wide = (
        shape["hidden_size"],
        shape["num_hidden_layers"],
        shape["intermediate_size"],
    )
    vocabulary, tokens = shape["vocab_size"], 8192
    one_layer = 16 * hidden + 2 * (2 * hidden + 2 * 1024 + 4 * wide)
    expected = {
        # bfloat16; the float32 gradient of one sub-group of at most 1e9 weights at the step.
        "weights": 2 * params / world,
        "gradients": 2 * params / world + 4 * min(1e9, params / world),
        # AdamW's two moments and the master weights, float32.
        "optimizer": 12 * params / world,
        # The bucket, a copy with the shards of each process side by side, and gathered weights.
        "buffers": 2 * (5e8 + 5e8 + 1e9),
        # Each layer's input, one layer computed again, and the gradients of its widest tensors.
        "activations": tokens * (2 * layers * hidden + one_layer + 3 * 2 * wide),
        "logits": 2 * 4 * 1024 * vocabulary,
        "head's gradient": 4 * vocabulary * hidden,
        "runtime": 2 * GIB,
    }
    assert found.cost.memory == pytest.approx(expected)
    assert found.processes == found.gpus == world


def test_tokens_and_operations_of_a_training(tmp_path: Path) -> None:
    config = configured(tmp_path, "8B", "resources.train.gpus=8")
    found = step(estimated(config), "iteration-1/train").cost
    # Packed: a prompt of 260 tokens once (1040 bytes of a line), two responses of 512.
    prompt = (len(json.dumps({"prompt": "x" * 1024})) + 1) / 4
    pair, responses = prompt + 2 * 512, 2 * 512
    # One pass of the reference and two epochs.
    assert found.tokens == pytest.approx(1000 * pair * 3)
    head = 128256 * 4096
    layers = PARAMS["8B"] - 2 * head - 4096
    forward = 1000 * 2 * (pair * layers + responses * head)
    assert found.flops == pytest.approx(forward * (1 + 2 * 3))


def test_lora_holds_gradients_and_optimizer_of_the_adapters_alone(tmp_path: Path) -> None:
    off = ("train.deepspeed.zero_stage=off", "resources.train.gpus=1")
    config = configured(tmp_path, "8B", *off, "train.lora.rank=16")
    memory = step(estimated(config), "iteration-1/train").cost.memory
    # r · (inputs + outputs) of q, k, v, o, gate, up, down.
    adapters = 32 * 16 * (2 * (4096 + 4096) + 2 * (4096 + 1024) + 3 * (4096 + 14336))
    assert memory["weights"] == 2 * (PARAMS["8B"] + adapters)
    assert memory["gradients"] == 2 * adapters
    assert memory["optimizer"] == 8 * adapters
    assert "head's gradient" not in memory


@pytest.mark.parametrize(
    ("settings", "measured"),
    [
        # python -m benchmarks.planned_memory --processes 1 --lora 0 (docs/planning.md)
        (["train.deepspeed.zero_stage=off"], 1.76),
        (["train.deepspeed.zero_stage=2"], 2.68),
        (["train.deepspeed.zero_stage=3"], 3.62),
    ],
)
def test_memory_on_a_cpu_is_what_was_measured(
    tmp_path: Path, settings: list[str], measured: float
) -> None:
    small = {
        "model_type": "llama",
        "hidden_size": 1024,
        "num_hidden_layers": 4,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "intermediate_size": 2816,
        "vocab_size": 16007,
        "max_position_embeddings": 8192,
        "dtype": "float32",
    }
    on_cpu = ("resources.train.gpus=0", "train.micro_batch_tokens=64", "train.precision=auto")
    config = configured(tmp_path, "8B", *settings, *on_cpu, "train.gradient_checkpointing=false")
    (tmp_path / "llama-8B/config.json").write_text(json.dumps(small))
    found = step(estimated(config), "iteration-1/train").cost
    assert found.peak_memory / 2**30 == pytest.approx(measured, rel=0.15)


def test_offload_moves_the_optimizer_to_the_host(tmp_path: Path) -> None:
    config = configured(
        tmp_path, "70B", "resources.train.gpus=8", "train.deepspeed.offload_optimizer=true"
    )
    found = step(estimated(config), "iteration-1/train").cost
    assert "optimizer" not in found.memory
    assert found.host_memory == 12 * PARAMS["70B"] / 8


def test_what_does_not_fit_names_the_setting(tmp_path: Path) -> None:
    gpus = "resources.train.gpus=8"
    large = "\n".join(estimated(configured(tmp_path, "70B", gpus)).warnings)
    for said in (
        "train does not fit",
        "train.deepspeed.offload_optimizer=true",
        "generate.vllm.tensor_parallel_size",
        "evaluate.dtype=bfloat16",
        "name another `store`",
    ):
        assert said in large
    assert "does not fit" not in "\n".join(estimated(configured(tmp_path, "8B", gpus)).warnings)


def test_vllm_keeps_what_the_weights_leave_for_keys_and_values(tmp_path: Path) -> None:
    found = step(estimated(configured(tmp_path, "8B")), "iteration-1/generate/0").cost
    assert found.memory["weights"] == 2 * PARAMS["8B"]
    assert found.peak_memory == pytest.approx(0.9 * 80e9)


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


def test_the_command_shows_steps_terms_and_the_sum() -> None:
    done = geb("plan", ROOT / "configs/quickstart.yaml", "--estimate")
    assert done.returncode == 0, done.stderr
    assert "iteration-3/train" in done.stdout
    assert "optimizer" in done.stdout
    assert "estimate: about" in done.stdout


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["generate.vllm.tensor_parallel_size=3"], "32 attention heads"),
        (["generate.vllm.extra_engine_args={pipeline_parallel_size: 48}"], "has 32 layers"),
    ],
)
def test_an_engine_that_cannot_be_split_so_is_refused(
    tmp_path: Path, settings: list[str], said: str
) -> None:
    config = configured(tmp_path, "8B", "resources.generate.gpus=48", *settings)
    with pytest.raises(UserError, match=said):
        plan(config)


@pytest.mark.parametrize("size", ["two", "0", "2.0"])
def test_a_pipeline_of_no_whole_number_of_parts_is_refused(tmp_path: Path, size: str) -> None:
    setting = f"generate.vllm.extra_engine_args={{pipeline_parallel_size: {size}}}"
    with pytest.raises(UserError, match="write an integer from 1 on"):
        configured(tmp_path, "8B", setting)


def test_each_gpu_of_a_shard_is_an_engine_for_its_share(tmp_path: Path) -> None:
    sampling = ["generate.num_shards=1", "generate.vllm.max_num_seqs=8"]
    one, eight = (
        step(
            estimated(configured(tmp_path, "8B", *sampling, f"resources.generate.gpus={gpus}")),
            "iteration-1/generate/0",
        ).cost
        for gpus in (1, 8)
    )
    assert (one.tokens, one.flops, one.memory) == (eight.tokens, eight.flops, eight.memory)
    assert one.seconds is not None
    assert eight.seconds is not None
    loading = 60 + 2 * PARAMS["8B"] / 1e9
    assert one.seconds - loading == pytest.approx(8 * (eight.seconds - loading), rel=0.05)


def test_threads_that_are_left_to_the_library_do_not_end_the_estimate(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("OPENBLAS_NUM_THREADS", raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "0")
    assert this_cpu().float32 > 0


def test_rows_of_a_json_array_and_of_a_folder_count(tmp_path: Path) -> None:
    rows = [{"prompt": f"How much is {number}?"} for number in range(70)]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "one").mkdir()
    (tmp_path / "one/a.jsonl").write_text(lines)
    (tmp_path / "one/b.jsonl").write_text(lines)
    (tmp_path / "one/notes.json").write_text("{}")
    (tmp_path / "one/.hidden.jsonl").write_text(lines)
    (tmp_path / "flat.json").write_text(json.dumps(rows))
    (tmp_path / "tall.json").write_text(json.dumps(rows, indent=2))
    (tmp_path / "none.json").write_text("{}")
    (tmp_path / "empty").mkdir()

    def counted(name: str) -> int | None:
        found = rows_of([FileInput(location=str(tmp_path / name), digest=name)])
        return None if found is None else found.number

    names = ("flat.json", "tall.json", "one", "none.json", "empty")
    assert [counted(name) for name in names] == [70, 70, 140, None, None]
