"""Training with compiled decoder layers: the curve, the names and the retries of one without."""

from __future__ import annotations

import shutil

import pytest
import torch
from safetensors.torch import load_file
from torch._dynamo.utils import counters

from stages.contract.errors import UserError
from tests.stages.train.train_helpers import train

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
# torch's compiler warns of torch's own code, and hides that in a way that errors do not know.
pytestmark = pytest.mark.filterwarnings("default")


def assert_same_training(found, expected):
    """Same curve, same names, and the same weights within float tolerance."""
    assert found.losses == pytest.approx(expected.losses, rel=1e-4, abs=1e-5)
    weights, others = (
        load_file(each.artifact.path / "checkpoint" / "model.safetensors")
        for each in (found, expected)
    )
    assert weights.keys() == others.keys()
    for name, weight in weights.items():
        torch.testing.assert_close(weight, others[name], rtol=1e-3, atol=1e-3, msg=name)


@needs_compiler
@pytest.mark.slow
def test_few_graphs_serve_rows_of_all_lengths(tmp_path, policy, pairs, trained):
    counters.clear()
    torch.compiler.reset()
    settings = {"compile": True, "gradient_checkpointing": True}
    found = train(tmp_path / "store", policy, [pairs], **settings)
    assert_same_training(found, trained)
    assert len({record["num_tokens"] for record in found.records}) > 4
    # Before and after the attention; with gradients, and without for the reference.
    assert 2 <= counters["stats"]["unique_graphs"] <= 8
    assert found.artifact.manifest.key != trained.artifact.manifest.key


def test_a_machine_without_a_compiler_is_told_before_anything_is_loaded(
    tmp_path, policy, pairs, monkeypatch
):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(UserError, match=r"train\.compile needs a compiler.*no-such-compiler") as it:
        train(tmp_path / "store", policy, [pairs], compile=True)
    assert it.value.remedy == "install g++, or set train.compile=false"
