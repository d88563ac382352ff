"""Real sampling with vLLM, in the environment that ``make setup-vllm`` makes.

``GEB_VLLM_PYTHON`` names another interpreter than ``.venv-vllm/bin/python``.
"""

import os
import signal
import subprocess

import psutil
import pytest
from transformers import MistralConfig

from stages.contract.errors import EXIT_FAILED, EXIT_USER
from stages.contract.events import Log, parse_event
from stages.generate.params import GenerateParams
from stages.generate.run import STAGE
from stages.store.base import Store
from stages.tables.schemas import RESPONSES, read_rows
from tests.programs import ROOT, VLLM_PYTHON
from tests.stage_calls import call_request, request_for, write_prompts
from tests.stages.generate.small_runs import TEXTS as SHORT_TEXTS
from tests.stages.generate.small_runs import assert_logprobs
from tests.tiny_models import (
    WORDS,
    make_head_beside_a_tied_config,
    make_tiny_llama,
    save_tiny_model,
)

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.release]

# Their lengths differ, the longest at the end.
TEXTS = [*SHORT_TEXTS, *(" ".join(WORDS * repeats) for repeats in (2, 3, 4))]
ENGINE = {"kv_cache_gib": 0.25, "enforce_eager": True, "max_num_seqs": 16}
PARAMS = {
    "backend": "vllm",
    "num_samples": 3,
    "max_new_tokens": 12,
    "dtype": "float32",
    "vllm": ENGINE,
}
# Two engines, two orders of summation: float32 rounding, far below what a wrong temperature or a
# shifted position would show.
ROUNDING = 1e-3


def engine(**settings):
    return {**PARAMS, "vllm": {**ENGINE, **settings}}


def start(request, path):
    """Starts the stage as a program of the vLLM environment; the log lies next to the request."""
    request.write(path)
    with path.with_suffix(".log").open("w") as log:
        return subprocess.Popen(
            [str(VLLM_PYTHON), "-m", "stages.generate", str(path)],
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env=os.environ | {"PYTHONPATH": str(ROOT), "VLLM_LOGGING_LEVEL": "WARNING"},
        )


def execute(request, path):
    """Runs the stage and returns its exit code and its events."""
    with start(request, path) as stage:
        output, _ = stage.communicate()
    return stage.returncode, [parse_event(line) for line in output.splitlines()]


def sample(request, path):
    """Runs the stage, which must succeed, and returns its rows."""
    code, events = execute(request, path)
    assert code == 0, f"{events}\n{path.with_suffix('.log').read_text()[-4000:]}"
    artifact = Store.in_folder(request.store).load(request.stage, request.key)
    assert artifact is not None
    return rows_of(artifact)


def rows_of(artifact):
    return list(read_rows(artifact.path / "responses.parquet", RESPONSES))


def tokens_of(rows):
    return [(row["prompt_id"], row["sample_index"], row["response_token_ids"]) for row in rows]


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
def whole(folder, inputs):
    """Responses sampled in one go."""
    request = request_for(GenerateParams(**PARAMS), inputs, folder / "store", seed=5)
    return sample(request, folder / "whole.json")


@pytest.fixture
def attempt(inputs, tmp_path):
    """Executes the stage with other settings of the engine; returns exit code and last event."""

    def run(**settings):
        request = request_for(GenerateParams(**engine(**settings)), inputs, tmp_path / "store")
        code, events = execute(request, tmp_path / "request.json")
        return code, events[-1]

    return run


def test_logprobs_equal_transformers(whole, inputs):
    assert_logprobs(whole, inputs["policy"], ROUNDING)


def test_head_beside_a_tied_config_samples(inputs, tmp_path):
    odd = make_head_beside_a_tied_config(
        tmp_path / "odd", hidden_size=128, initializer_range=0.2, seed=1
    )
    changed = {**inputs, "policy": odd}
    request = request_for(GenerateParams(**PARAMS), changed, tmp_path / "store", seed=5)
    rows = sample(request, tmp_path / "request.json")
    assert_logprobs(rows, odd, ROUNDING)


def test_a_mistral_policy_has_the_tokens_of_tokenizer_json(inputs, tmp_path):
    sizes = {"hidden_size": 128, "intermediate_size": 64, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 32}
    config = MistralConfig(**sizes, **heads, max_position_embeddings=256)
    policy = save_tiny_model(config, tmp_path / "mistral")
    # Its own library, which only vLLM's environment has, would read this file.
    (policy / "tekken.json").write_text("{}")
    request = request_for(
        GenerateParams(**PARAMS), {**inputs, "policy": policy}, tmp_path / "store"
    )
    rows = sample(request, tmp_path / "request.json")
    assert_logprobs(rows, policy, ROUNDING)


def test_responses_depend_on_no_layout(whole, inputs, tmp_path):
    parts = []
    for index in range(2):
        params = GenerateParams(
            **engine(max_num_seqs=4), shard_index=index, num_shards=2, chunk_responses=15
        )
        request = request_for(params, inputs, tmp_path / "store", seed=5)
        parts += sample(request, tmp_path / f"shard-{index}.json")
    assert tokens_of(parts) == tokens_of(whole)


def test_temperature_zero_agrees_with_the_other_backend(inputs, tmp_path):
    params = {**PARAMS, "temperature": 0.0, "num_samples": 1}
    request = request_for(GenerateParams(**params), inputs, tmp_path / "store")
    rows = sample(request, tmp_path / "request.json")
    params["backend"] = "transformers"
    other, _ = call_request(
        STAGE, request_for(GenerateParams(**params), inputs, tmp_path / "store")
    )
    for row, expected in zip(rows, rows_of(other), strict=True):
        logprobs = expected.pop("response_logprobs")
        assert row.pop("response_logprobs") == pytest.approx(logprobs, abs=ROUNDING)
        assert row == expected


@pytest.mark.parametrize(
    ("argument", "value"), [("max_num_batched_token", 64), ("quantization", "int3")]
)
def test_what_vllm_does_not_know_is_the_users_mistake(attempt, argument, value):
    code, last = attempt(extra_engine_args={argument: value})
    assert code == EXIT_USER
    assert argument in last.message
    assert "generate.vllm" in last.remedy


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"kv_cache_gib": 100_000.0}, "kv_cache_gib"),
        ({"kv_cache_gib": 1e-6, "max_num_seqs": 9}, "max_num_seqs"),
    ],
    ids=["too-much", "too-little"],
)
def test_want_of_memory_may_be_retried_and_names_what_to_lower(attempt, settings, named):
    code, last = attempt(**settings)
    assert code == EXIT_FAILED
    assert named in last.message


def test_a_killed_shard_goes_on_where_it_was(whole, inputs, tmp_path):
    params = GenerateParams(
        **engine(max_num_seqs=2), chunk_responses=6, shard_index=1, num_shards=2
    )
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

    _, events = execute(request, tmp_path / "resumed.json")
    assert any("chunks are there already" in str(event) for event in events)
    rows = sample(request, tmp_path / "found.json")
    assert tokens_of(rows) == tokens_of(whole)[-len(rows) :]
