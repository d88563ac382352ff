"""`auto` as a type of numbers: the type on each processor, before keys are computed."""

from pathlib import Path

import pytest

from flows.pipeline.algorithm import resolve_run
from flows.pipeline.loading import load_config
from stages.contract import number_types

QUICKSTART = Path(__file__).parents[3] / "configs/quickstart.yaml"
SECTIONS = ("train.precision", "sft.precision", "generate.dtype", "evaluate.dtype")
AUTO = [f"{name}=auto" for name in SECTIONS]
# What does not follow this machine's CPU, by settings.
OTHERS = {
    "execution.runner=docker": {},
    "execution.runner=slurm": dict.fromkeys(SECTIONS, "float32"),
    "execution.runner=slurm resources.train.gpus=1": {
        **dict.fromkeys(SECTIONS, "float32"),
        "train.precision": "bfloat16",
    },
    "resources.train.gpus=2": {"train.precision": "bfloat16"},
    "train.lora.rank=4": {"train.precision": "float32"},
    "train.lora.rank=4 resources.train.gpus=1": {"train.precision": "bfloat16"},
    "generate.dtype=float16": {"generate.dtype": "float16"},
}


@pytest.fixture(params=["", "avx512_bf16", "amx_bf16", "bf16"])
def flag(request, tmp_path, monkeypatch):
    """A CPU that has a flag of bfloat16, or none."""
    flag = request.param
    info = tmp_path / "cpuinfo"
    info.write_text(f"model name\t: A\nflags\t\t: fpu avx2 avx512f {flag}\n")
    monkeypatch.setattr(number_types, "CPU_INFO", info)
    return flag


@pytest.mark.parametrize("settings", OTHERS)
def test_auto_follows_the_processor(flag, settings):
    config = load_config(QUICKSTART, [*AUTO, *settings.split()])
    values = config.to_values()
    chosen = {name: values[name.split(".")[0]][name.split(".")[1]] for name in SECTIONS}
    of_the_cpu = dict.fromkeys(SECTIONS, "bfloat16" if flag else "float32")
    assert chosen == of_the_cpu | OTHERS[settings]
    for step in resolve_run(config).steps:
        assert "auto" not in step.params.result_fields().values(), step.name


def test_a_suite_follows_as_the_run_does(flag):
    suite = "suites.other.prompts=data/quickstart/prompts.jsonl"
    section = ["suites.other.evaluate.dtype=auto", "suites.other.score.oracle=reward_model"]
    model = "suites.other.oracle_model=owner/model@0000000000000000000000000000000000000000"
    other = load_config(QUICKSTART, [suite, *section, model]).suites["other"]
    expected = "bfloat16" if flag else "float32"
    assert (other.evaluate.dtype, other.score.reward_model.dtype) == (expected, expected)
