"""Compiled decoder layers train like eager ones; layers that cannot be compiled are refused."""

import pytest
import torch
from functorch.compile import nop
from torch import nn
from torch._dynamo.backends.common import aot_autograd

from stages.contract.errors import UserError
from tests.stages.train.train_helpers import assert_same_training, train

# The compiler reads the gradients of its inputs.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")

LORA = {"rank": 4, "alpha": 8.0}


@pytest.fixture
def compiled_layers(monkeypatch):
    """Number of layers that are compiled; the graphs are run as they are, by no compiler."""
    layers = []
    compiled = nn.Module.compile

    def graphs_only(layer, **options):
        layers.append(layer)
        compiled(layer, **options, backend="aot_eager")

    monkeypatch.setattr(nn.Module, "compile", graphs_only)
    torch._dynamo.reset()
    yield layers
    torch._dynamo.reset()


@pytest.mark.slow
@pytest.mark.parametrize("change", [{}, {"lora": LORA}, {"gradient_checkpointing": True}], ids=str)
def test_compiled_layers_train_as_eager_ones(tmp_path, policy, pairs, compiled_layers, change):
    eager = train(tmp_path / "eager", policy, [pairs], **change)
    assert not compiled_layers
    compiled = train(tmp_path / "compiled", policy, [pairs], compile_layers=True, **change)
    # The reference's and the policy's; both round alike.
    assert len(compiled_layers) == 4
    assert compiled.artifact.manifest.key == eager.artifact.manifest.key
    assert_same_training(compiled, eager)
    assert compiled.losses[0] == pytest.approx(eager.losses[0], abs=1e-6)
    assert compiled.records[0]["chosen_logratio"] == 0
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0


@pytest.mark.slow
def test_rows_of_all_lengths_share_their_graphs(tmp_path, policy, pairs, compiled_layers):
    torch._dynamo.utils.counters.clear()
    train(tmp_path / "store", policy, [pairs], compile_layers=True, micro_batch_tokens=40)
    assert 0 < torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 8


@pytest.mark.parametrize("part", ["forward", "backward"])
def test_a_layer_that_cannot_be_compiled_is_refused(tmp_path, monkeypatch, policy, pairs, part):
    compiled = nn.Module.compile
    failed = []

    def fail(graph, inputs):
        failed.append(graph)
        raise RuntimeError("no C++ compiler")

    backend = fail if part == "forward" else aot_autograd(fw_compiler=nop, bw_compiler=fail)
    monkeypatch.setattr(
        nn.Module, "compile", lambda layer, **options: compiled(layer, **options, backend=backend)
    )
    torch._dynamo.reset()
    with pytest.raises(UserError, match="compiler") as caught:
        train(tmp_path / "store", policy, [pairs], compile_layers=True)
    torch._dynamo.reset()
    assert failed
    assert "train.compile_layers=false" in caught.value.remedy
