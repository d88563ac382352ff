"""Real sampling with vLLM, in the environment that ``make setup-vllm`` makes.

``GEB_VLLM_PYTHON`` names another interpreter than ``.venv-vllm/bin/python``.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
from pathlib import Path

import psutil
import pytest
import torch

from stages.contract.context import ModelSource
from stages.contract.digests import derive_seed, prompt_id
from stages.contract.errors import UserError
from stages.contract.events import Failure, Log, parse_event
from stages.contract.request import Request
from stages.contract.store import Store
from stages.contract.tables import RESPONSES, SCORES, read_rows
from stages.generate.params import GenerateParams
from stages.generate.run import STAGE
from stages.modeling.load import load_causal_lm
from stages.score.params import ScoreParams
from stages.score.run import STAGE as SCORE
from tests.stage_calls import call_request, request_for, user_turn, write_prompts
from tests.tiny_models import EOS_ID, WORDS, make_tiny_llama

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

ROOT = Path(__file__).parents[3]
PYTHON = Path(os.environ.get("GEB_VLLM_PYTHON", ROOT / ".venv-vllm/bin/python"))
TEXTS = [" ".join(WORDS[: 1 + index % 11]) + f" {WORDS[index // 11]}" for index in range(23)]
PARAMS = {
    "backend": "vllm",
    "num_samples": 3,
    "max_new_tokens": 12,
    "dtype": "float32",
    "vllm": {"kv_cache_gib": 0.25, "enforce_eager": True},
}
# Two engines, two orders of summation: float32 rounding, far below what a wrong temperature or a
# shifted position would show.
ROUNDING = 1e-3


def start(request: Request, path: Path) -> subprocess.Popen[str]:
    """Starts the stage as a program of the vLLM environment."""
    assert PYTHON.exists(), f"no interpreter at {PYTHON}: run `make setup-vllm`"
    request.write(path)
    with path.with_suffix(".log").open("w") as log:
        return subprocess.Popen(
            [str(PYTHON), "-m", "stages.generate", str(path)],
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        )


def finish(request: Request, path: Path) -> Path:
    """Runs the stage to its end and returns the artifact's folder."""
    with start(request, path) as stage:
        output = stage.communicate()[0]
    assert stage.returncode == 0, f"{output}\n{path.with_suffix('.log').read_text()}"
    artifact = Store.open(request.store).load("generate", request.key)
    assert artifact is not None
    return artifact.path


def rows_of(artifact: Path) -> list[dict]:
    return list(read_rows(artifact / "responses.parquet", RESPONSES))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("vllm")


@pytest.fixture(scope="module")
def inputs(folder):
    return {
        # Heads of 32: vLLM's attention on CPUs knows no smaller ones.
        "policy": make_tiny_llama(folder / "model", hidden_size=128, initializer_range=0.2),
        "prompts": write_prompts(folder / "prompts.parquet", TEXTS),
    }


@pytest.fixture(scope="module")
def artifact(folder, inputs):
    """Responses sampled in one go."""
    request = request_for(GenerateParams(**PARAMS), inputs, folder / "store", seed=5)
    return finish(request, folder / "whole.json")


def test_rows_are_those_of_the_contract(artifact):
    rows = rows_of(artifact)
    ids = [prompt_id(user_turn(text)) for text in TEXTS]
    assert [row["prompt_id"] for row in rows] == [each for each in ids for _ in range(3)]
    assert [row["sample_index"] for row in rows] == [0, 1, 2] * len(TEXTS)
    for row in rows:
        assert row["seed"] == derive_seed(5, row["prompt_id"], row["sample_index"])
        stopped = row["response_token_ids"][-1] == EOS_ID
        assert row["finish_reason"] == ("stop" if stopped else "length")
        assert stopped or len(row["response_token_ids"]) == 12
        assert "</s>" not in row["response"]
    metrics = json.loads((artifact / "metrics.json").read_text())
    assert metrics["finish_reasons"].keys() == {"stop", "length"}


def test_logprobs_are_those_of_transformers(artifact, inputs):
    model = load_causal_lm(ModelSource(str(inputs["policy"])), dtype="float32")
    for row in rows_of(artifact):
        prompt, response = row["prompt_token_ids"], row["response_token_ids"]
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
        expected = logits.log_softmax(-1).gather(-1, torch.tensor(response)[:, None])[:, 0]
        assert row["response_logprobs"] == pytest.approx(expected.tolist(), abs=ROUNDING)


def test_the_responses_can_be_scored(artifact, tmp_path):
    code = tmp_path / "oracle.py"
    code.write_text("def score(prompts, responses, references): return map(len, responses)")
    request = request_for(
        ScoreParams(oracle="python"),
        {"responses": artifact / "responses.parquet", "code": code},
        tmp_path / "store",
    )
    scores = read_rows(call_request(SCORE, request)[0].path / "scores.parquet", SCORES)
    assert [each["score"] for each in scores] == [len(row["response"]) for row in rows_of(artifact)]


def test_responses_depend_neither_on_shards_nor_on_chunks(artifact, inputs, tmp_path):
    parts = []
    for index in range(2):
        params = GenerateParams(
            **{**PARAMS, "vllm": {**PARAMS["vllm"], "max_num_seqs": 4}},
            shard_index=index,
            num_shards=2,
            chunk_prompts=5,
        )
        request = request_for(params, inputs, tmp_path / "store", seed=5)
        parts += rows_of(finish(request, tmp_path / f"shard-{index}.json"))
    assert [row["response_token_ids"] for row in parts] == [
        row["response_token_ids"] for row in rows_of(artifact)
    ]


def test_temperature_zero_agrees_with_the_other_backend(inputs, tmp_path):
    params = {**PARAMS, "temperature": 0.0, "num_samples": 1}
    vllm = finish(
        request_for(GenerateParams(**params), inputs, tmp_path / "store"), tmp_path / "request.json"
    )
    params["backend"] = "transformers"
    other, _ = call_request(
        STAGE, request_for(GenerateParams(**params), inputs, tmp_path / "store")
    )
    for row, expected in zip(rows_of(vllm), rows_of(other.path), strict=True):
        logprobs = expected.pop("response_logprobs")
        assert row.pop("response_logprobs") == pytest.approx(logprobs, abs=ROUNDING)
        assert row == expected


def test_a_killed_shard_goes_on_where_it_was(artifact, inputs, tmp_path):
    params = GenerateParams(**PARAMS, chunk_prompts=2)
    request = request_for(params, inputs, tmp_path / "store", seed=5)
    with start(request, tmp_path / "killed.json") as stage:
        assert stage.stdout is not None
        for line in stage.stdout:
            event = parse_event(line)
            if isinstance(event, Log) and event.message.startswith("wrote"):
                children = psutil.Process(stage.pid).children(recursive=True)
                stage.kill()
    assert stage.returncode == -signal.SIGKILL
    _, alive = psutil.wait_procs(children, timeout=60)
    assert not alive, "the engine outlived the stage"

    resumed = finish(request, tmp_path / "resumed.json")
    assert json.loads((resumed / "timings.json").read_text())["chunks_reused"] >= 1
    assert [row["response_token_ids"] for row in rows_of(resumed)] == [
        row["response_token_ids"] for row in rows_of(artifact)
    ]


def test_a_bad_checkpoint_ends_with_exit_code_64(inputs, tmp_path):
    policy = make_tiny_llama(tmp_path / "bare", chat_template=None)
    request = request_for(
        GenerateParams(**PARAMS), {**inputs, "policy": policy}, tmp_path / "store"
    )
    with start(request, tmp_path / "request.json") as stage:
        events = [parse_event(line) for line in stage.communicate()[0].splitlines()]
    assert stage.returncode == 64
    assert isinstance(events[-1], Failure)
    assert "no chat template" in events[-1].message


def test_an_interpreter_without_vllm_says_so(inputs, tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="needs vLLM"):
        call_request(STAGE, request_for(GenerateParams(**PARAMS), inputs, tmp_path / "store"))
