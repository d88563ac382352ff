"""Trainings that are refused, each with its remedy."""

from pathlib import Path

import pytest
import torch

from stages.contract.errors import UserError
from stages.modeling.logprobs import ResponseLogprobs
from stages.train.params import TrainParams
from tests.stages.train.train_helpers import train
from tests.tiny_models import WORDS, make_tiny_llama


def test_a_gradient_that_is_not_finite_is_refused(tmp_path, policy, pairs):
    with pytest.raises(UserError, match=r"diverged at step 1: .*grad_norm inf") as caught:
        train(tmp_path / "store", policy, [pairs], design="selm", kappa=1e25)
    assert caught.value.remedy


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


def test_pairs_beyond_the_context_are_refused(tmp_path, pairs):
    short = make_tiny_llama(tmp_path / "short", max_position_embeddings=8)
    with pytest.raises(UserError, match=r"a sequence has \d+ tokens, and the context of") as caught:
        train(tmp_path / "store", short, [pairs])
    assert caught.value.remedy == "set train.max_length_tokens=8"
    remedied = {"max_length_tokens": 8, "max_prompt_tokens": 4, "epochs": 1}
    training = train(tmp_path / "store", short, [pairs], **remedied)
    assert training.summary["steps"] == 4
    assert any("cut to 8 tokens" in message for message in training.warnings)


def test_pairs_of_tokens_beyond_the_embeddings_are_refused(tmp_path, pairs):
    small = make_tiny_llama(tmp_path / "small", words=WORDS[:-1])
    with pytest.raises(UserError, match="token 18 is not in the vocabulary of 18"):
        train(tmp_path / "store", small, [pairs])


def test_a_reference_with_another_tokenizer_is_refused(tmp_path, policy, pairs):
    words = [*WORDS[:-1], "purple"]
    reference = make_tiny_llama(tmp_path / "reference", words=words)
    with pytest.raises(UserError, match="differ in 2 tokens") as caught:
        train(tmp_path / "store", policy, [pairs], reference=reference)
    assert "reference with the policy's tokenizer" in caught.value.remedy


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"kappa": 1.0, "target_ratio": 0.1}, r"exclude each other.*`train\.kappa: null`"),
        *(
            ({"design": design, "target_ratio": 0.1}, "no κ gives a ratio to 0; set train.kappa")
            for design in ("feb", "selm", "vpo", "se_popo")
        ),
    ],
    ids=str,
)
def test_settings_that_exclude_each_other_are_refused(given, said):
    with pytest.raises(ValueError, match=said):
        TrainParams(**given)
