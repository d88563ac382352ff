"""Real sampling with vLLM, in the environment that ``make setup-vllm`` makes.

``GEB_VLLM_PYTHON`` names another interpreter than ``.venv-vllm/bin/python``.
"""

import json
import re
import signal
import subprocess
from pathlib import Path

import psutil
import pytest

from stages.contract.adapters import write_base
from stages.contract.digests import derive_seed, prompt_id
from stages.contract.events import Log, parse_event
from stages.contract.request import Request
from stages.generate.params import GenerateParams
from stages.generate.run import STAGE
from stages.harness.context import ModelSource
from stages.modeling.load import load_causal_lm, merge_adapter
from stages.tables.schemas import RESPONSES, read_rows
from tests.stage_calls import call_request, file_input, request_for, user_turn, write_prompts
from tests.stages.generate.small_runs import TEXTS as SHORT_TEXTS
from tests.stages.generate.small_runs import assert_logprobs, save_tiny_adapters
from tests.stages.generate.vllm_session import ENVIRONMENT, PYTHON, vllm_session
from tests.tiny_models import (
    EOS_ID,
    WORDS,
    make_head_beside_a_tied_config,
    make_tiny_llama,
    make_tiny_tokenizer,
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


def rows_of(artifact: Path) -> list[dict]:
    return list(read_rows(artifact / "responses.parquet", RESPONSES))


def tokens_of(rows: list[dict]) -> list[tuple]:
    return [(row["prompt_id"], row["sample_index"], row["response_token_ids"]) for row in rows]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("vllm")


@pytest.fixture(scope="module")
def session(folder):
    with vllm_session(folder) as session:
        yield session


@pytest.fixture(scope="module")
def inputs(folder):
    return {
        # Heads of 32: vLLM's attention on CPUs knows no smaller ones.
        "policy": make_tiny_llama(folder / "model", hidden_size=128, initializer_range=0.2),
        "prompts": write_prompts(folder / "prompts.parquet", TEXTS),
    }


@pytest.fixture(scope="module")
def artifact(session, folder, inputs):
    """Responses sampled in one go."""
    request = request_for(GenerateParams(**PARAMS), inputs, folder / "store", seed=5)
    return session.finish(request, folder / "whole.json")


@pytest.fixture
def attempt(session, inputs, tmp_path):
    """Executes the stage with other parameters and returns exit code and last event."""

    def run(params, **other_inputs):
        request = request_for(
            GenerateParams(**params), {**inputs, **other_inputs}, tmp_path / "store", seed=5
        )
        code, events = session.execute(request, tmp_path / "request.json")
        return code, events[-1]

    return run


def test_rows_follow_the_contract(artifact):
    rows = rows_of(artifact)
    ids = [prompt_id(user_turn(text)) for text in TEXTS]
    assert [row["prompt_id"] for row in rows] == [prompt for prompt in ids for _ in range(3)]
    assert [row["sample_index"] for row in rows] == [0, 1, 2] * len(TEXTS)
    for row in rows:
        assert row["seed"] == derive_seed(5, row["prompt_id"], row["sample_index"])
        stopped = row["response_token_ids"][-1] == EOS_ID
        assert row["finish_reason"] == ("stop" if stopped else "length")
        assert stopped or len(row["response_token_ids"]) == 12
        assert "</s>" not in row["response"]
    metrics = json.loads((artifact / "metrics.json").read_text())
    assert metrics["finish_reasons"].keys() == {"stop", "length"}


def test_logprobs_equal_transformers(artifact, inputs):
    model = load_causal_lm(ModelSource(str(inputs["policy"])), dtype="float32")
    assert_logprobs(rows_of(artifact), model, ROUNDING)


def test_head_beside_a_tied_config_samples(session, inputs, tmp_path):
    odd = make_head_beside_a_tied_config(
        tmp_path / "odd", hidden_size=128, initializer_range=0.2, seed=1
    )
    changed = {**inputs, "policy": odd}
    request = request_for(GenerateParams(**PARAMS), changed, tmp_path / "store", seed=5)
    rows = rows_of(session.finish(request, tmp_path / "request.json"))
    model = load_causal_lm(ModelSource(str(odd)), dtype="float32")
    assert_logprobs(rows, model, ROUNDING)


@pytest.mark.parametrize("num_shards", [1, 2, 7])
def test_responses_depend_on_no_layout(session, artifact, inputs, tmp_path, num_shards):
    parts = []
    sizes = []
    for index in range(num_shards):
        params = GenerateParams(
            **engine(max_num_seqs=4), shard_index=index, num_shards=num_shards, chunk_prompts=5
        )
        request = request_for(params, inputs, tmp_path / "store", seed=5)
        shard = session.finish(request, tmp_path / f"shard-{index}.json")
        parts += rows_of(shard)
        sizes.append(json.loads((shard / "metrics.json").read_text())["prompts"])
    assert tokens_of(parts) == tokens_of(rows_of(artifact))
    assert max(sizes) - min(sizes) <= 1


def test_temperature_zero_agrees_with_the_other_backend(session, inputs, tmp_path):
    params = {**PARAMS, "temperature": 0.0, "num_samples": 1}
    request = request_for(GenerateParams(**params), inputs, tmp_path / "store")
    vllm = session.finish(request, tmp_path / "request.json")
    params["backend"] = "transformers"
    other, _ = call_request(
        STAGE, request_for(GenerateParams(**params), inputs, tmp_path / "store")
    )
    for row, expected in zip(rows_of(vllm), rows_of(other.path), strict=True):
        logprobs = expected.pop("response_logprobs")
        assert row.pop("response_logprobs") == pytest.approx(logprobs, abs=ROUNDING)
        assert row == expected


def test_an_adapter_is_worn_by_the_policy(session, inputs, tmp_path):
    adapter = save_tiny_adapters(tmp_path / "adapter", inputs["policy"])
    # As a training leaves it.
    make_tiny_tokenizer().save_pretrained(adapter)
    write_base(adapter, file_input(inputs["policy"]))
    wearing = {**inputs, "adapter": adapter}
    request = request_for(GenerateParams(**PARAMS), wearing, tmp_path / "store", seed=5)
    rows = rows_of(session.finish(request, tmp_path / "request.json"))
    bare = load_causal_lm(ModelSource(str(inputs["policy"])), dtype="float32")
    with pytest.raises(AssertionError):
        assert_logprobs(rows, bare, ROUNDING)
    assert_logprobs(rows, merge_adapter(bare, adapter), ROUNDING)


@pytest.mark.parametrize(
    ("settings", "message", "remedy"),
    [
        (
            {"extra_engine_args": {"max_num_batched_token": 64}},
            "unexpected keyword argument 'max_num_batched_token'",
            "correct generate.vllm",
        ),
        (
            {"extra_engine_args": {"seed": 1, "max_model_len": 64}},
            "extra_engine_args.max_model_len is set by the stage itself",
            "docs/sampling.md",
        ),
        (
            {"extra_engine_args": {"quantization": "int3"}},
            "Unknown quantization method: int3",
            "generate.vllm",
        ),
        ({"tensor_parallel_size": 3}, "divisible by tensor parallel size (3)", "generate.vllm"),
    ],
    ids=["unknown", "own", "quantization", "tensor-parallel"],
)
def test_what_vllm_does_not_know_is_the_users_mistake(attempt, settings, message, remedy):
    code, last = attempt(engine(**settings))
    assert code == 64
    assert message in last["message"]
    assert remedy in last["remedy"]


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"kv_cache_gib": 100_000.0}, "kv_cache_gib"),
        ({"kv_cache_gib": 1e-6, "max_num_seqs": 9}, "max_num_seqs"),
    ],
    ids=["too-much", "too-little"],
)
def test_want_of_memory_may_be_retried_and_names_what_to_lower(attempt, settings, named):
    code, last = attempt(engine(**settings))
    assert code == 1
    assert "vLLM broke down" in last["message"]
    assert named in last["message"]


def start(request: Request, path: Path) -> subprocess.Popen[str]:
    """Starts the stage as a program of the vLLM environment."""
    request.write(path)
    with path.with_suffix(".log").open("w") as log:
        return subprocess.Popen(
            [str(PYTHON), "-m", "stages.generate", str(path)],
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env=ENVIRONMENT,
        )


def test_a_killed_shard_goes_on_where_it_was(session, artifact, inputs, tmp_path):
    params = GenerateParams(**engine(max_num_seqs=2), chunk_prompts=2, shard_index=1, num_shards=2)
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

    _, events = session.execute(request, tmp_path / "resumed.json")
    messages = [event.get("message", "") for event in events]
    [kept] = [message for message in messages if "chunks are there already" in message]
    number, total = re.findall(r"\d+", kept)
    assert 0 < int(number) < int(total)
    # The store has its artifact.
    resumed = session.finish(request, tmp_path / "found.json")
    rows = rows_of(resumed)
    assert tokens_of(rows) == tokens_of(rows_of(artifact))[-len(rows) :]
