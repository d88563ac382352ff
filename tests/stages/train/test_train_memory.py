"""Memory that does not suffice: fewer tokens at once with the same result, or a clear word."""

from pathlib import Path

import pytest
import torch

from stages.contract.errors import UserError
from stages.modeling.logprobs import ResponseLogprobs
from tests.stages.train.train_helpers import train

# What the tests' machine can hold: fewer tokens in a forward pass that is trained through.
ROOM = 100


def little_room(monkeypatch, room: int, *, from_call: int = 0) -> None:
    """Makes forward passes of more than ``room`` tokens run out of memory, from some call on."""
    forward = ResponseLogprobs.forward
    calls = iter(range(1 << 30))

    def limited(self, input_ids, *arguments):
        too_much = torch.is_grad_enabled() and input_ids.numel() > room
        if torch.is_grad_enabled() and next(calls) >= from_call and too_much:
            raise torch.OutOfMemoryError("no room for the activations")
        return forward(self, input_ids, *arguments)

    monkeypatch.setattr(ResponseLogprobs, "forward", limited)


@pytest.mark.parametrize("from_call", [0, 5])
def test_training_goes_on_with_half_the_tokens(tmp_path, monkeypatch, policy, pairs, from_call):
    whole = train(tmp_path / "whole", policy, [pairs], micro_batch_tokens=1000)
    little_room(monkeypatch, ROOM, from_call=from_call)
    settings = {"micro_batch_tokens": 320, "checkpoint_every_steps": 1}
    found = train(tmp_path / "store", policy, [pairs], **settings)
    # Half of what the largest step has, 320 tokens being more than that.
    [warning] = found.warnings
    assert "in place of 320" in warning
    # What was done is not done again.
    assert found.steps == list(range(1, 9))
    assert found.losses == pytest.approx(whole.losses, rel=1e-4, abs=1e-5)
    assert found.artifact.manifest.key == whole.artifact.manifest.key


def test_a_pair_that_does_not_fit_alone_is_explained(tmp_path, monkeypatch, policy, pairs):
    little_room(monkeypatch, 3)
    with pytest.raises(UserError, match=r"longest sample has \d+ tokens.*no room") as caught:
        train(tmp_path / "store", policy, [pairs], micro_batch_tokens=30)
    for way in ("gradient_checkpointing", "max_length_tokens", "zero_stage=3", "lora"):
        assert way in caught.value.remedy


@pytest.mark.slow
def test_workers_go_on_with_half_the_tokens(tmp_path, monkeypatch, policy, pairs):
    """A module that every process loads at its start makes the second worker's memory small."""
    (tmp_path / "sitecustomize.py").write_text(
        "import os\n"
        "if os.environ.get('RANK') == '1':\n"
        "    import torch\n"
        "    from stages.modeling.logprobs import ResponseLogprobs\n"
        "    forward = ResponseLogprobs.forward\n"
        "    def limited(self, input_ids, *arguments):\n"
        "        if torch.is_grad_enabled() and input_ids.numel() > 40:\n"
        "            raise torch.OutOfMemoryError('no room for the activations')\n"
        "        return forward(self, input_ids, *arguments)\n"
        "    ResponseLogprobs.forward = limited\n"
    )
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{Path.cwd()}")
    settings = {"deepspeed": {"zero_stage": 2}, "processes": 2, "epochs": 1}
    found = train(tmp_path / "store", policy, [pairs], micro_batch_tokens=70, **settings)
    [warning] = found.warnings
    assert "process 1 of 2: no room" in warning
    assert len(found.losses) == 4
