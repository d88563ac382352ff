"""The engine's optimizer: every setting arrives, and a step is AdamW's by the textbook."""

import io

import pytest
import torch
from transformers import TrainingArguments

from stages.contract.events import Emitter
from stages.harness.context import ModelSource
from stages.train.params import TrainParams
from stages.training.batches import Batch, Example, Plan
from stages.training.engine import Engine, Process
from stages.training.loop import Objective, TrainingLoop
from stages.training.policy import Numerics, load_logprob_model
from tests.tiny_models import make_tiny_llama

PARAMS = TrainParams(
    epochs=4,
    learning_rate=1e-2,
    lr_schedule="linear",
    warmup_ratio=0.5,
    adam_epsilon=1e-4,
    max_grad_norm=0.5,
)


def engine_of(params, num_examples, folder, said=None):
    numerics = Numerics.of(params, on_gpu=False, local_rank=0)
    ids = torch.arange(3, 11, dtype=torch.int32).numpy()
    examples = [Example(ids[:3], ids[3:])] * num_examples
    plan = Plan(examples, params, global_batch=1, world_size=1, seed=0)
    process = Process(0, 0, 1, Emitter(said or io.StringIO()), lambda: False)
    model = load_logprob_model(ModelSource(str(make_tiny_llama(folder))), params, numerics)
    return Engine(model, plan, numerics, process), plan, process


@pytest.mark.parametrize(("ratio", "steps"), [(0.03, 2), (0.03, 34), (0.1, 30), (0.25, 16), (0, 3)])
def test_the_warm_up_has_as_many_steps_as_transformers_gives_it(ratio, steps, tmp_path):
    params = TrainParams(epochs=1, warmup_ratio=ratio, lr_schedule="linear", learning_rate=1.0)
    engine, *_ = engine_of(params, steps, tmp_path)
    rates = [engine.learning_rate(step) for step in range(steps)]
    expected = TrainingArguments(tmp_path, warmup_steps=ratio).get_warmup_steps(steps)
    assert rates.index(max(rates)) == expected


@pytest.mark.parametrize(
    ("steps", "ratio", "is_told"), [(1, 0.03, True), (1, 0, False), (2, 0.03, False)]
)
def test_a_training_whose_only_step_learns_nothing_says_so(steps, ratio, is_told, tmp_path):
    log = io.StringIO()
    engine_of(TrainParams(epochs=1, warmup_ratio=ratio), steps, tmp_path, log)
    assert ("nothing is learnt" in log.getvalue()) is is_told


def test_steps_are_adamw_s_with_clipped_gradients(tmp_path):
    engine, plan, _ = engine_of(PARAMS, 1, tmp_path)
    rows = engine.rows(plan.samples)
    weights = dict(engine.model.named_parameters())
    expected = {name: weight.detach().double() for name, weight in weights.items()}
    moments = {name: (torch.zeros_like(weight),) * 2 for name, weight in expected.items()}
    # Up to the whole rate in two of four steps, and down again.
    for step, rate in enumerate((0.0, 0.5, 1.0, 0.5), 1):
        engine.backward(-engine.logprobs(rows).sum(), last=True)
        gradients = {name: weight.grad.double() for name, weight in weights.items()}
        norm = (
            torch.stack([gradient.square().sum() for gradient in gradients.values()]).sum().sqrt()
        )
        assert engine.learning_rate(step - 1) == pytest.approx(rate * PARAMS.learning_rate)
        assert engine.step(engine.learning_rate(step - 1)) == pytest.approx(norm.item())
        for name, weight in expected.items():
            gradient = gradients[name] * min(1.0, PARAMS.max_grad_norm / norm)
            first = 0.9 * moments[name][0] + 0.1 * gradient
            second = 0.999 * moments[name][1] + 0.001 * gradient.square()
            moments[name] = first, second
            update = first / (1 - 0.9**step) / ((second / (1 - 0.999**step)).sqrt() + 1e-4)
            expected[name] = weight - rate * 1e-2 * update
    for name, weight in weights.items():
        torch.testing.assert_close(weight.double(), expected[name], rtol=1e-4, atol=1e-6, msg=name)


class Diverging(Objective):
    """A loss that is infinite for all samples."""

    num_sums = 1

    def __init__(self, engine):
        self._engine = engine

    def micro_loss(self, samples):
        logprobs = self._engine.logprobs(self._engine.rows(samples))
        return logprobs.sum() * torch.inf, torch.full((1,), torch.nan, dtype=torch.float64)


def test_a_sample_without_weight_adds_nothing(tmp_path):
    engine, plan, process = engine_of(PARAMS, 1, tmp_path)
    loop = TrainingLoop(engine, Diverging(engine), plan, process, None, None)
    loss, sums = loop.micro_step(Batch(plan.samples, 0.0), last=True)
    assert loss == 0
    assert sums.tolist() == [0]
    for weight in engine.model.parameters():
        assert weight.grad.abs().sum() == 0
