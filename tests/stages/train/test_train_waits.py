"""A micro-batch never makes the host wait for the device: neither its loss nor its metrics."""

from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from stages.training.loop import TrainingLoop
from tests.stages.train.train_helpers import train

# Their result, or its shape, is in the device's memory; the host has to wait for it.
WAITING = {
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten.nonzero.default,
    torch.ops.aten.masked_select.default,
    torch.ops.aten.is_nonzero.default,
    torch.ops.aten.equal.default,
}


class Waits(TorchDispatchMode):
    """Counts operations that wait."""

    def __init__(self):
        super().__init__()
        self.found = Counter()

    def __torch_dispatch__(self, operation, types, arguments=(), options=None):
        if operation in WAITING:
            self.found[str(operation)] += 1
        return operation(*arguments, **(options or {}))


@pytest.mark.parametrize("probability", ["sequence", "token_mean", "token"])
def test_a_micro_batch_waits_for_no_result(tmp_path, monkeypatch, policy, pairs, probability):
    # In packed rows; for padded ones transformers itself asks whether rows are packed.
    waits, micro_batches = Waits(), 0
    step = TrainingLoop.micro_step

    def watched(self, batch, *, last):
        nonlocal micro_batches
        micro_batches += 1
        with waits:
            return step(self, batch, last=last)

    monkeypatch.setattr(TrainingLoop, "micro_step", watched)
    settings = {"epochs": 1, "micro_batch_tokens": 48, "probability": probability}
    train(tmp_path / "store", policy, [pairs], **settings)
    assert micro_batches >= 2
    assert waits.found == {}
