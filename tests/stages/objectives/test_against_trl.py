"""The preference loss against TRL's own DPO loss: its `_compute_loss`, run on log-probs we choose.

A DPOTrainer needs a model, a dataset and a tokenizer to exist. Its loss needs none of them, only
the per-token log-probabilities that a model returns; so the method is called on an object that
holds the attributes it reads, with a model that returns ours. The formula is TRL's, not a copy.
"""

from types import SimpleNamespace

import pytest
import torch
from trl.trainer.dpo_trainer import DPOTrainer

from stages.objectives.objective import preference_loss

BETA = 0.1
CHOSEN = torch.tensor([-12.0, -80.0, -3.5, -40.0, -0.25])
REJECTED = torch.tensor([-15.0, -75.0, -3.5, -44.0, -7.0])
REF_CHOSEN = torch.tensor([-13.0, -78.0, -2.5, -40.0, -0.5])
REF_REJECTED = torch.tensor([-14.0, -78.5, -4.5, -40.0, -2.0])


class Metrics(dict):
    def __missing__(self, name):
        self[name] = []
        return self[name]


def trl_loss(chosen, rejected, *, f_divergence_type, alpha=None, loss_type="sigmoid"):
    """TRL's mean loss of a batch, and its gradient with respect to both sides."""
    logps = torch.cat([chosen, rejected]).clone().requires_grad_()
    size = len(logps)

    def model(**inputs):
        # One prompt token, one response token: the response's log-probability is that token's.
        ones = torch.ones(size, 2)
        return SimpleNamespace(
            log_probs=torch.stack([torch.zeros(size), logps], dim=1)[:, 1:],
            entropy=ones,
            mean_logits=ones,
            is_top1=ones.bool(),
        )

    model.training = True
    gather = SimpleNamespace(
        device=torch.device("cpu"), gather_for_metrics=lambda x: x, gather=lambda x: x
    )
    trainer = SimpleNamespace(
        model=model,
        accelerator=gather,
        aux_loss_enabled=False,
        ld_alpha=None,
        precompute_ref_logps=True,
        f_divergence_type=f_divergence_type,
        f_alpha_divergence_coef=alpha,
        beta=BETA,
        loss_types=[loss_type],
        loss_weights=[1.0],
        label_smoothing=0.0,
        use_weighting=False,
        _metrics={"train": Metrics()},
        _total_train_tokens=0,
        _tp_size=1,
    )
    inputs = {
        "input_ids": torch.ones(size, 2, dtype=torch.long),
        "attention_mask": torch.ones(size, 2, dtype=torch.long),
        "completion_mask": torch.tensor([[0, 1]] * size),
        "ref_chosen_logps": REF_CHOSEN,
        "ref_rejected_logps": REF_REJECTED,
    }
    loss = DPOTrainer._compute_loss(trainer, model, inputs, return_outputs=False)
    (gradient,) = torch.autograd.grad(loss, logps)
    return loss.detach(), gradient


@pytest.mark.parametrize(
    ("divergence", "trl_arguments"),
    # One response token: TRL's mean over tokens is the sum.
    [
        ("reverse_kl", {"f_divergence_type": "reverse_kl"}),
        ("forward_kl", {"f_divergence_type": "forward_kl"}),
        ("js", {"f_divergence_type": "js_divergence"}),
        ("hellinger", {"f_divergence_type": "alpha_divergence", "alpha": 0.5}),
        (0.25, {"f_divergence_type": "alpha_divergence", "alpha": 0.25}),
        (0.75, {"f_divergence_type": "alpha_divergence", "alpha": 0.75}),
        (0.0, {"f_divergence_type": "alpha_divergence", "alpha": 0.0}),
        (1.0, {"f_divergence_type": "alpha_divergence", "alpha": 1.0}),
    ],
)
@pytest.mark.parametrize("loss_type", ["sigmoid", "ipo"])
def test_equals_trl(divergence, trl_arguments, loss_type):
    expected, expected_gradient = trl_loss(CHOSEN, REJECTED, loss_type=loss_type, **trl_arguments)
    logps = torch.cat([CHOSEN, REJECTED]).requires_grad_()
    chosen, rejected = logps.chunk(2)
    loss = preference_loss(
        chosen - REF_CHOSEN,
        rejected - REF_REJECTED,
        beta=BETA,
        divergence=divergence,
        loss=loss_type,
    ).mean()
    (gradient,) = torch.autograd.grad(loss, logps)
    torch.testing.assert_close(loss.detach(), expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-5, atol=1e-6)
