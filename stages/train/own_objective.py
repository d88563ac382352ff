"""The ``python`` objective: terms of the loss by a function in a Python file.

Shapes: `B` pairs, `T` tokens.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stages.contract.errors import UserError
from stages.harness.user_code import UserFunction
from stages.objectives.numerics import working_precision
from stages.objectives.objective import ResponseLogps

_SIGNATURE = '(chosen, rejected, **settings) -> {"loss": …, "bonus": …}'
_REMEDY = f"let the function be {_SIGNATURE}, with one or both terms, each a tensor [B]"


class UserObjective(UserFunction):
    """Calls ``function(chosen, rejected, **settings)`` and checks what it returns.

    ``chosen`` and ``rejected`` are :class:`stages.objectives.objective.ResponseLogps`.
    """

    noun = "objective"
    section = "train.python"
    signature = _SIGNATURE
    remedy = "fix the function, or train.python.settings"

    def __call__(self, chosen: ResponseLogps, rejected: ResponseLogps) -> Mapping[str, Tensor]:
        """The terms of each pair: `loss` and `bonus`, or one of them, both [B]."""
        terms = self.call(chosen, rejected)
        if not isinstance(terms, Mapping) or not terms or not set(terms) <= {"loss", "bonus"}:
            raise UserError(f"{self.title} returned {terms!r:.200}: not terms", _REMEDY)
        for term, value in terms.items():
            if not isinstance(value, Tensor) or value.shape != chosen.logp.shape:
                raise UserError(
                    f"{self.title} returned {term} = {value!r:.200}: not one value for each of "
                    f"{len(chosen.logp)} pairs",
                    _REMEDY,
                )
            if torch.is_grad_enabled() and not value.requires_grad:
                raise UserError(
                    f"{self.title} returned {term} without a gradient: nothing would be learnt",
                    "compute it from the policy's log-probabilities (`logp`, `token_logp`), "
                    "undetached",
                )
        return {term: working_precision(value) for term, value in terms.items()}


def made_up(seed: int) -> ResponseLogps:
    """Log-probabilities of responses of one to four tokens, with scores."""
    generator = torch.Generator().manual_seed(seed)
    token_logp, ref_token_logp = -3.0 * torch.rand(2, 4, 4, generator=generator)
    mask = torch.arange(4) <= torch.arange(4)[:, None]
    score = torch.rand(4, generator=generator)
    return ResponseLogps(token_logp.requires_grad_(), ref_token_logp, mask, score)


def try_file(path: Path, name: str, settings: Mapping[str, Any]) -> None:
    """Checks that the function ``name`` of a file gives finite terms with finite gradients."""
    objective = UserObjective(path, name, settings)
    sides = made_up(0), made_up(1)
    leaves = [side.token_logp for side in sides]
    for term, values in objective(*sides).items():
        gradients = torch.autograd.grad(
            values.sum(), leaves, retain_graph=True, materialize_grads=True
        )
        if not all(tensor.isfinite().all() for tensor in (values, *gradients)):
            raise UserError(
                f"{objective.title} returned {term} {values.tolist()}, or a gradient, that is not "
                "finite for log-probabilities between -12 and 0",
                "guard the function's exponentials, logarithms and divisions",
            )
