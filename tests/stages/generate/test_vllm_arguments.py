"""Settings of ``generate.vllm`` as the engine gets them, without an engine."""

from __future__ import annotations

import io
from typing import Any

import pytest

from stages.contract.context import ModelSource
from stages.contract.events import Emitter
from stages.generate import vllm_backend
from stages.generate.params import GenerateParams
from stages.generate.policy import Policy


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the engine is started with, in place of its start."""
    told: dict[str, Any] = {}

    def start(source: ModelSource, own: dict[str, Any], **options: Any) -> object:
        told.update(own, source=source, **options)
        return object()

    monkeypatch.setattr(vllm_backend, "require_vllm", lambda setting, *, batch_invariant: None)
    monkeypatch.setattr(vllm_backend, "cache_setting", lambda *sizes: "kv_cache_gib")
    monkeypatch.setattr(vllm_backend, "start_engine", start)
    return told


def load(**settings: Any) -> None:
    policy = Policy(ModelSource("here", None), None, None, frozenset({2}), 128, 16)
    params = GenerateParams.model_validate(
        {"backend": "vllm", "dtype": "bfloat16", "vllm": {"kv_cache_gib": 1.5, **settings}}
    )
    vllm_backend.load(policy, params, Emitter(io.StringIO()))


def test_settings_reach_the_engine_by_vllms_names(started: dict[str, Any]) -> None:
    settings = {
        "tensor_parallel_size": 2,
        "gpu_memory_utilization": 0.5,
        "max_num_seqs": 7,
        "enforce_eager": True,
        "quantization": "fp8",
    }
    load(**settings)
    assert settings.items() <= started.items()
    assert started["kv_cache_gib"] == 1.5
    assert (started["dtype"], started["max_model_len"]) == ("bfloat16", 128)
    assert started["logprobs_mode"] == "raw_logprobs"
    assert started["source"].name_or_path == "here"


def test_further_arguments_go_to_the_engine_as_they_are(started: dict[str, Any]) -> None:
    load(extra_engine_args={"seed": 3})
    assert started["extra"] == {"seed": 3}
    assert started["tensor_parallel_size"] == 1
