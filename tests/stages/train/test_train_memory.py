"""Memory that does not suffice: the error names the settings to lower."""

from pathlib import Path

import pytest
import torch

from stages.contract.errors import UserError
from stages.modeling.logprobs import ResponseLogprobs
from tests.stages.train.train_helpers import train


def test_lower_budget_goes_on_from_the_checkpoint(tmp_path, monkeypatch, policy, pairs):
    settings = {"micro_batch_tokens": 320, "checkpoint_every_steps": 1}
    whole = train(tmp_path / "whole", policy, [pairs], **settings)
    forward = ResponseLogprobs.forward
    calls = iter(range(1 << 30))

    def limited(self, *arguments):
        if torch.is_grad_enabled() and next(calls) == 5:
            raise torch.OutOfMemoryError("no room for the activations")
        return forward(self, *arguments)

    monkeypatch.setattr(ResponseLogprobs, "forward", limited)
    with pytest.raises(UserError, match=r"longest sample has \d+ tokens.*no room") as caught:
        train(tmp_path / "store", policy, [pairs], **settings)
    for way in ("micro_batch_tokens", "max_length_tokens", "zero_stage=3", "lora"):
        assert way in caught.value.remedy
    settings["micro_batch_tokens"] = 160
    training = train(tmp_path / "store", policy, [pairs], **settings)
    assert training.steps == list(range(6, 9))
    assert training.losses == pytest.approx(whole.losses, rel=1e-4, abs=1e-5)
    assert training.artifact.manifest.key == whole.artifact.manifest.key


@pytest.mark.slow
def test_error_names_the_worker_that_lacked_memory(tmp_path, monkeypatch, policy, pairs):
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
    with pytest.raises(UserError, match="process 1 of 2: no room"):
        train(tmp_path / "store", policy, [pairs], micro_batch_tokens=70, **settings)
