"""Samplings of one program: one engine, and the bytes that each has in a program alone."""

from __future__ import annotations

import pytest

from stages.contract.program import execute_all
from stages.contract.request import Resources
from stages.generate import transformers_backend
from stages.generate.params import GenerateParams
from stages.generate.run import STAGE
from tests.stage_calls import EventLog, call_request, request_for, write_prompts
from tests.stages.generate.small_runs import TEXTS
from tests.tiny_models import make_tiny_llama

TRAINING = {
    "num_samples": 3,
    "max_new_tokens": 12,
    "dtype": "float32",
    "transformers": {"batch_size": 16},
}
# All that an evaluation may set otherwise.
EVALUATION = TRAINING | {
    "num_samples": 1,
    "temperature": 0.5,
    "top_p": 0.9,
    "max_new_tokens": 7,
    "stop_token_ids": [5],
    "system_prompt": "be brief",
    "transformers": {"batch_size": 4},
    "chunk_prompts": 5,
}


@pytest.fixture
def loads(monkeypatch):
    """Models that were loaded, one entry each."""
    loaded = []
    load = transformers_backend.load_causal_lm

    def counted(*args, **kwargs):
        loaded.append(args)
        return load(*args, **kwargs)

    monkeypatch.setattr(transformers_backend, "load_causal_lm", counted)
    return loaded


@pytest.fixture
def requests_in(policy, tmp_path):
    """Requests for both samplings, in a store of its own."""

    def make(store, *, evaluation=EVALUATION, processes=1):
        return [
            request_for(
                GenerateParams.model_validate(params),
                {
                    "policy": policy,
                    "prompts": write_prompts(tmp_path / f"{seed}.parquet", TEXTS[seed:]),
                },
                tmp_path / store,
                seed=seed,
                resources=Resources(processes=processes),
            )
            for seed, params in enumerate((TRAINING, evaluation))
        ]

    return make


def compute_together(first, second):
    joined = first.model_copy(update={"then": (second,)})
    return [artifact for _, artifact in execute_all(STAGE, joined, EventLog())]


def digests(artifacts):
    return [each.manifest.digest() for each in artifacts]


def test_one_engine_gives_the_bytes_of_two(requests_in, loads):
    apart = [call_request(STAGE, request)[0] for request in requests_in("apart")]
    loads.clear()
    together = compute_together(*requests_in("together"))
    assert len(loads) == 1
    assert digests(together) == digests(apart)


def test_another_type_of_weights_wants_another_engine(requests_in, loads):
    requests = requests_in("store", evaluation=EVALUATION | {"dtype": "bfloat16"})
    compute_together(*requests)
    assert len(loads) == 2


def test_a_sampling_that_is_there_already_needs_no_engine(requests_in, loads):
    first, second = requests_in("store")
    call_request(STAGE, first)
    call_request(STAGE, second)
    loads.clear()
    compute_together(first, second)
    assert not loads


@pytest.mark.slow
def test_several_engines_go_on_with_the_second_sampling(requests_in):
    apart = [call_request(STAGE, request)[0] for request in requests_in("apart")]
    together = compute_together(*requests_in("together", processes=2))
    assert digests(together) == digests(apart)
    assert [each.manifest.notes["engines"] for each in together] == [2, 2]


def test_another_policy_wants_another_engine(requests_in, loads, tmp_path):
    inputs = {"policy": make_tiny_llama(tmp_path / "other", seed=1)}
    params = GenerateParams.model_validate(TRAINING)

    def requests(store):
        first, _ = requests_in(store, evaluation=TRAINING)
        inputs["prompts"] = tmp_path / "1.parquet"
        return first, request_for(params, inputs, tmp_path / store, seed=1)

    apart = [call_request(STAGE, request)[0] for request in requests("apart")]
    loads.clear()
    together = compute_together(*requests("together"))
    assert len(loads) == 2
    assert digests(together) == digests(apart)
