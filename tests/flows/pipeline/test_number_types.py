"""`auto` as a type of numbers: the type on each processor, before keys are computed."""

from pathlib import Path

import pytest

from flows.pipeline.algorithm import resolve_run
from flows.pipeline.loading import load_config
from stages.contract import number_types

QUICKSTART = Path(__file__).parents[3] / "configs/quickstart.yaml"
SECTIONS = ("train.precision", "sft.precision", "generate.dtype", "evaluate.dtype")
AUTO = [f"{name}=auto" for name in SECTIONS]


@pytest.fixture(params=["", "avx512_bf16", "amx_bf16", "bf16"])
def flag(request, tmp_path, monkeypatch) -> str:
    """A CPU that has a flag of bfloat16, or none."""
    flag: str = request.param
    info = tmp_path / "cpuinfo"
    info.write_text(f"model name\t: A\nflags\t\t: fpu avx2 avx512f {flag}\n")
    monkeypatch.setattr(number_types, "CPU_INFO", info)
    return flag


def types(*overrides: str) -> dict[str, str]:
    values = load_config(QUICKSTART, [*AUTO, *overrides]).to_values()
    return {name: values[name.split(".")[0]][name.split(".")[1]] for name in SECTIONS}


def test_auto_follows_the_cpu_of_this_machine(flag):
    expected = "bfloat16" if flag else "float32"
    assert types() == dict.fromkeys(SECTIONS, expected)
    assert types("execution.runner=docker") == dict.fromkeys(SECTIONS, expected)


def test_the_cpu_of_another_host_is_given_float32(flag):
    elsewhere = ["execution.runner=slurm"]
    assert types(*elsewhere) == dict.fromkeys(SECTIONS, "float32")
    assert types(*elsewhere, "resources.train.gpus=1")["train.precision"] == "bfloat16"


def test_a_stage_with_a_gpu_is_given_bfloat16(flag):
    expected = types() | {"train.precision": "bfloat16"}
    assert types("resources.train.gpus=2") == expected


def test_adapters_on_a_cpu_are_trained_in_float32(flag):
    assert types("train.lora.rank=4") == types() | {"train.precision": "float32"}
    on_gpu = types("train.lora.rank=4", "resources.train.gpus=1")
    assert on_gpu["train.precision"] == "bfloat16"


def test_a_named_type_is_kept(flag):
    assert types("train.precision=bfloat16", "generate.dtype=float16") == types() | {
        "train.precision": "bfloat16",
        "generate.dtype": "float16",
    }


def test_a_suite_follows_as_the_run_does(flag):
    suite = "suites.other.prompts=data/quickstart/prompts.jsonl"
    section = ["suites.other.evaluate.dtype=auto", "suites.other.score.oracle=reward_model"]
    model = "suites.other.oracle_model=owner/model@0000000000000000000000000000000000000000"
    config = load_config(QUICKSTART, [suite, *section, model])
    other = config.suites["other"]
    assert other.evaluate is not None
    assert other.score is not None
    expected = "bfloat16" if flag else "float32"
    assert (other.evaluate.dtype, other.score.reward_model.dtype) == (expected, expected)


def test_no_step_is_left_with_auto(flag):
    for step in resolve_run(load_config(QUICKSTART, AUTO)).steps:
        assert "auto" not in step.params.result_fields().values(), step.name
