"""Weights that stay in their files: cast, they are those of a model loaded in the right dtype."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load_file, save_file
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

from stages.contract.context import ModelSource
from stages.contract.request import Resources
from stages.modeling.load import load_causal_lm
from stages.modeling.mapped import folder_to_share, load_mapped, load_shared
from tests.tiny_models import SIZES


@pytest.fixture
def checkpoint(tmp_path):
    # Its embeddings are tied, and scaled by a constant that the model computes in its own dtype.
    Gemma3ForCausalLM(Gemma3TextConfig(**SIZES, head_dim=8)).bfloat16().save_pretrained(tmp_path)
    return tmp_path


def test_weights_stay_in_their_dtype_and_nothing_else_does(checkpoint):
    source = ModelSource(str(checkpoint))
    expected = load_causal_lm(source, dtype="float32", device=torch.device("cpu"))
    model = load_mapped(source, dtype="float32")
    assert {each.dtype for each in model.parameters()} == {torch.bfloat16}
    buffers = dict(model.named_buffers())
    for name, buffer in expected.named_buffers():
        assert torch.equal(buffers[name], buffer), name
    tokens = torch.arange(3, 9)[None]
    assert torch.equal(model.float()(tokens).logits, expected(tokens).logits)


def test_files_of_several_dtypes_are_read_in_the_one_asked_for(checkpoint):
    path = checkpoint / "model.safetensors"
    weights = load_file(path)
    weights["model.norm.weight"] = torch.full_like(weights["model.norm.weight"].float(), 1 / 3)
    save_file(weights, path, metadata={"format": "pt"})
    model = load_mapped(ModelSource(str(checkpoint)), dtype="float32")
    assert torch.equal(model.model.norm.weight.data, weights["model.norm.weight"])


@pytest.mark.parametrize("size", ["5GB", "10KB"])
def test_a_repository_of_the_hub_is_mapped_from_its_cache(tmp_path, monkeypatch, checkpoint, size):
    cache, commit = tmp_path / "cache", "0" * 40
    Gemma3ForCausalLM.from_pretrained(checkpoint).save_pretrained(
        cache / "models--someone--something" / "snapshots" / commit, max_shard_size=size
    )
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    source = ModelSource("someone/something", revision=commit)
    assert load_mapped(source, dtype="float32").dtype == torch.bfloat16


def test_processes_read_the_weights_that_the_first_one_cast(tmp_path, checkpoint):
    source = ModelSource(str(checkpoint))
    expected = load_causal_lm(source, dtype="float32", device=torch.device("cpu"))
    tokens = torch.arange(3, 9)[None]
    folder = folder_to_share(Resources(processes=2), tmp_path)
    models = [load_shared(source, dtype="float32", folder=folder.name) for _ in range(2)]
    for model in models:
        assert {each.dtype for each in model.parameters()} == {torch.float32}
        assert torch.equal(model(tokens).logits, expected(tokens).logits)
    mapped = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines()}
    files = {str(each) for each in Path(folder.name).glob("*.weight")}
    assert len(files) == len(list(expected.parameters()))
    assert files <= mapped
    folder.cleanup()
    assert torch.equal(models[1](tokens).logits, expected(tokens).logits)


def test_one_process_and_gpus_share_no_weights(tmp_path):
    assert folder_to_share(Resources(), tmp_path) is None
    assert folder_to_share(Resources(gpus=2), tmp_path) is None
