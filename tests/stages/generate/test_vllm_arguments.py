"""Settings of ``generate.vllm`` as the engine gets them, without an engine."""

import io
import sys
from functools import partial
from types import SimpleNamespace

import pytest

from stages.contract.errors import UserError
from stages.contract.events import Emitter
from stages.generate import vllm_backend
from stages.generate.backend import EncodedPrompt
from stages.generate.params import GenerateParams
from stages.generate.policy import Policy, load_policy
from stages.harness.context import ModelSource
from tests.tiny_models import make_head_beside_a_tied_config, make_tiny_llama


@pytest.fixture
def started(monkeypatch):
    """Arguments of the engine, in place of its start."""
    return engine_of(monkeypatch, on_cpu=False)


def engine_of(monkeypatch, *, on_cpu):
    """Puts an engine that only keeps its arguments in the place of vLLM's."""
    kept = {}
    keep = {"__init__": lambda self, **given: kept.update(given)}
    arguments = type("EngineArgs", (), keep)
    platform = SimpleNamespace(is_cpu=lambda: on_cpu)
    engine = SimpleNamespace(from_engine_args=lambda _: object())
    for name, module in {
        "vllm": SimpleNamespace(),
        "vllm.engine.arg_utils": SimpleNamespace(EngineArgs=arguments),
        "vllm.platforms": SimpleNamespace(current_platform=platform),
        "vllm.v1.engine.llm_engine": SimpleNamespace(LLMEngine=engine),
    }.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(vllm_backend, "require_vllm", lambda: None)
    return kept


HERE = ModelSource("owner/model", "0" * 40)


def load(**settings):
    policy = Policy(HERE, None, frozenset({2}), 128, 16)
    params = GenerateParams.model_validate(
        {"backend": "vllm", "dtype": "bfloat16", "vllm": {"kv_cache_gib": 1.5, **settings}}
    )
    vllm_backend.load(policy, params, Emitter(io.StringIO()))


def test_settings_reach_the_engine_by_vllms_names(started):
    settings = {
        "tensor_parallel_size": 2,
        "gpu_memory_utilization": 0.5,
        "max_num_seqs": 7,
        "enforce_eager": True,
    }
    load(**settings, extra_engine_args={"seed": 3, "quantization": "fp8"})
    assert (started["seed"], started["quantization"]) == (3, "fp8")
    assert settings.items() <= started.items()
    assert started["kv_cache_memory_bytes"] == 1.5 * 2**30
    assert (started["dtype"], started["max_model_len"]) == ("bfloat16", 128)
    assert started["logprobs_mode"] == "raw_logprobs"
    assert started["language_model_only"]
    assert (started["model"], started["revision"]) == (HERE.name_or_path, HERE.revision)


def test_an_argument_that_the_stage_sets_is_refused(started):
    with pytest.raises(UserError, match=r"extra_engine_args\.max_model_len") as caught:
        load(extra_engine_args={"seed": 1, "max_model_len": 64})
    assert "docs/sampling.md" in caught.value.remedy


def test_head_beside_a_tied_config_is_loaded(started, tmp_path):
    params = GenerateParams.model_validate({"backend": "vllm", "vllm": {"kv_cache_gib": 1.0}})
    for make, overrides in (
        (make_head_beside_a_tied_config, {"tie_word_embeddings": False}),
        (partial(make_tiny_llama, tie_word_embeddings=True), None),
    ):
        folder = make(tmp_path / f"{overrides}")
        policy = load_policy(ModelSource(str(folder)), params)
        vllm_backend.load(policy, params, Emitter(io.StringIO()))
        assert started.pop("hf_overrides", None) == overrides


@pytest.mark.parametrize(
    ("asked", "on_cpu", "expected"),
    [(None, True, True), (None, False, False), (False, True, False), (True, False, True)],
)
def test_unset_a_cpu_s_engine_alone_compiles_nothing(monkeypatch, asked, on_cpu, expected):
    started = engine_of(monkeypatch, on_cpu=on_cpu)
    load(enforce_eager=asked)
    assert started["enforce_eager"] is expected


class Engine:
    """Takes requests and never has any under way."""

    def __init__(self):
        self.requests = []

    def has_unfinished_requests(self):
        return False

    def get_num_unfinished_requests(self):
        return 0

    def add_request(self, name, prompt, params):
        self.requests.append((name, prompt, params))


def test_every_field_of_a_sampling_reaches_the_engine(monkeypatch):
    engine = Engine()
    monkeypatch.setattr(vllm_backend, "require_vllm", lambda: None)
    monkeypatch.setattr(vllm_backend, "start_engine", lambda *_, **__: engine)
    inputs = SimpleNamespace(tokens_input=lambda token_ids: token_ids)
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(SamplingParams=dict))
    monkeypatch.setitem(sys.modules, "vllm.inputs", SimpleNamespace(engine=inputs))
    monkeypatch.setitem(sys.modules, "vllm.inputs.engine", inputs)
    settings = {"temperature": 0.3, "top_p": 0.4, "max_new_tokens": 5, "num_samples": 2}
    params = GenerateParams.model_validate({"backend": "vllm", "dtype": "bfloat16", **settings})
    policy = Policy(HERE, None, frozenset({5, 2}), 128, 16)
    backend = vllm_backend.load(policy, params, Emitter(io.StringIO()))
    prompts = [EncodedPrompt([7, 8], [11, 12]), EncodedPrompt([9], [13, 14])]
    held = frozenset({(1, 1)})
    assert list(backend.generate(prompts, held)) == []
    shared = {"temperature": 0.3, "top_p": 0.4, "max_tokens": 5, "stop_token_ids": [2, 5]}
    shared |= {"logprobs": 0, "detokenize": False}
    assert engine.requests == [
        ("0/0", [7, 8], shared | {"seed": 11}),
        ("0/1", [7, 8], shared | {"seed": 12}),
        ("1/0", [9], shared | {"seed": 13}),
    ]
