"""Choices that depend on the device: compiled layers, activations, the size of micro-batches."""

import io
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from stages.contract.events import Emitter
from stages.train.params import TrainParams
from stages.training import fit
from stages.training.batches import Plan
from stages.training.engine import Process
from stages.training.policy import leaves_room, memory_choices, pays_to_compile

GIB = 2**30


def params(**settings: Any) -> TrainParams:
    return TrainParams(design="none", kappa=0.0, **settings)


def test_without_trials_the_choice_takes_the_least_memory():
    assert memory_choices(params(), tries=False) == [(True, 8192)]


def test_with_trials_the_fastest_choice_comes_first():
    choices = memory_choices(params(), tries=True)
    assert choices == [(False, 16384), (False, 8192), (True, 16384), (True, 8192)]


@pytest.mark.parametrize(
    ("settings", "choices"),
    [
        ({"micro_batch_tokens": 100}, [(False, 100), (True, 100)]),
        ({"gradient_checkpointing": True}, [(True, 16384), (True, 8192)]),
        ({"gradient_checkpointing": False, "micro_batch_tokens": 100}, [(False, 100)]),
    ],
    ids=str,
)
def test_settings_leave_less_to_choose(settings, choices):
    assert memory_choices(params(**settings), tries=True) == choices


@pytest.mark.parametrize(
    ("peak", "trained", "available", "has_room"),
    [
        # An 8B model with adapters, 16,384 tokens, on cards of 140 and 80 GiB.
        (66, 42e6, 139, True),
        (66, 42e6, 78, True),
        (71, 42e6, 78, False),
        # All weights of a 1B model: gradients and moments take 14 GiB more.
        (40, 1.24e9, 78, True),
        (25, 1.24e9, 39, False),
    ],
)
def test_a_training_needs_gradients_and_moments_besides(peak, trained, available, has_room):
    assert leaves_room(peak * GIB, int(trained), available * GIB) == has_room


@pytest.mark.parametrize(
    ("settings", "tokens", "on_gpu", "pays"),
    [
        ({}, 2_000_000, True, True),
        ({}, 1_999_999, True, False),
        ({}, 10**9, False, False),
        ({"compile_layers": False}, 10**9, True, False),
        ({"compile_layers": True}, 1, False, True),
        ({"compile_layers": True, "deepspeed": {"zero_stage": 2}}, 10**9, True, False),
    ],
    ids=str,
)
def test_layers_are_compiled_on_a_gpu_in_long_trainings(settings, tokens, on_gpu, pays):
    assert pays_to_compile(params(**settings), tokens, on_gpu=on_gpu) == pays


class TriedFit(fit.Fit[TrainParams]):
    """A fit on a GPU that is not there; ``answers`` are those of its trials."""

    load_model: Any = None
    make_objective: Any = None
    write_records: Any = None

    def __init__(self, answers: list[bool], settings: TrainParams) -> None:
        self.ctx: Any = SimpleNamespace(params=settings)
        self.numerics: Any = SimpleNamespace(device=torch.device("cuda"))
        self.process = Process(0, 0, 1, Emitter(io.StringIO()), lambda: False)
        self.plan = Plan([], settings, 8, 1, seed=0)
        self._compiling_failed = False
        self._answers = iter(answers)

    def _fits(self, model: Any) -> bool:
        return next(self._answers)


@pytest.mark.parametrize(
    ("answers", "tokens", "recomputes"),
    [
        ([True], 16384, False),
        ([False, True], 8192, False),
        ([False, False, True], 16384, True),
        ([False, False, False], 8192, True),
    ],
)
def test_the_first_choice_that_fits_is_taken(monkeypatch, answers, tokens, recomputes):
    recomputing = []
    monkeypatch.setattr(
        fit, "enable_gradient_checkpointing", lambda *_, **__: recomputing.append(True)
    )
    tried = TriedFit(answers, params(compile_layers=False))
    tried._choose_by_memory(SimpleNamespace(train=lambda: None, policy=None))
    assert tried.plan.params.token_budget == tokens
    assert tried.plan.params.gradient_checkpointing == recomputes == bool(recomputing)


def test_deepspeed_recomputes_untried(monkeypatch):
    monkeypatch.setattr(fit, "enable_gradient_checkpointing", lambda *_, **__: None)
    tried = TriedFit([], params(deepspeed={"zero_stage": 2}))
    tried._choose_by_memory(SimpleNamespace(train=lambda: None, policy=None))
    assert tried.plan.params.gradient_checkpointing is True
    assert tried.plan.params.token_budget == 8192
