"""Sampling on GPUs: seeds, log-probabilities against a forward pass on the CPU."""

import pytest

from stages.contract.request import Resources
from stages.generate.params import GenerateParams
from stages.tables.schemas import RESPONSES, read_rows
from tests.gpu.programs import run_stage
from tests.stage_calls import request_for, write_prompts
from tests.stages.generate.small_runs import TEXTS, assert_logprobs

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]

PARAMS = {"num_samples": 3, "max_new_tokens": 12}
VLLM = {"gpu_memory_utilization": 0.3, "max_num_seqs": 16}
# Tolerance of a log-probability, in 16 bits and in float32.
ROUNDING = {"bfloat16": 0.15, "float32": 1e-3}


@pytest.fixture
def sampled(policy, tmp_path):
    """Samples with a backend on GPUs and returns the rows."""

    def sample(name, *, gpus=1, seed=5, **params):
        request = request_for(
            GenerateParams(**{**PARAMS, **params}),
            {"policy": policy, "prompts": write_prompts(tmp_path / "prompts.parquet", TEXTS)},
            tmp_path / name,
            seed=seed,
            resources=Resources(gpus=gpus),
        )
        path = tmp_path / f"{name}.json"
        folder = run_stage(request, path, vllm=params["backend"] == "vllm")
        return list(read_rows(folder / "responses.parquet", RESPONSES))

    return sample


def tokens_of(rows):
    return [(row["prompt_id"], row["sample_index"], row["response_token_ids"]) for row in rows]


@pytest.mark.parametrize(
    ("backend", "dtype"),
    [("transformers", "float32"), ("transformers", "bfloat16"), ("vllm", "bfloat16")],
)
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_logprobs_equal_the_cpu_s(sampled, policy, backend, dtype, temperature):
    rows = sampled("store", backend=backend, dtype=dtype, temperature=temperature, vllm=VLLM)
    assert_logprobs(rows, policy, ROUNDING[dtype])


@pytest.mark.parametrize("backend", ["transformers", "vllm"])
def test_responses_depend_on_the_seed(sampled, backend):
    settings = {"backend": backend, "vllm": VLLM}
    first = sampled("first", **settings)
    assert tokens_of(sampled("again", **settings)) == tokens_of(first)
    assert tokens_of(sampled("other", seed=6, **settings)) != tokens_of(first)


def test_temperature_zero_is_the_same_on_gpu_and_cpu(sampled):
    greedy = {"backend": "transformers", "dtype": "float32", "temperature": 0.0, "num_samples": 1}
    assert tokens_of(sampled("gpu", **greedy)) == tokens_of(sampled("cpu", gpus=0, **greedy))
