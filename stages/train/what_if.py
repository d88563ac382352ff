"""Objective of stored pairs at the first step of a training, under other settings; no model.

    python -m stages.train.what_if ASKED.json FOUND.json

At that step the policy is the model that sampled an iteration's own pairs, so that the sampler's
log-probabilities are log π. Where the reference is the same model, stored log π_ref is log π too.

Shapes: `B` pairs, `S` tokens of a response.
"""

import json
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from stages.contract.errors import UserError
from stages.contract.events import Emitter, dump_json
from stages.harness.program import run_program
from stages.objectives.kappa import KappaController
from stages.objectives.metrics import METRIC_SUMS, loss_and_metrics, step_metrics
from stages.objectives.objective import OwnTerms
from stages.train.data import (
    Pair,
    RefLogprobs,
    Response,
    load_pairs,
    padded_logprobs,
    pair_batch,
)
from stages.train.own_objective import load_file
from stages.train.params import TrainParams
from stages.train.reference import read_reference, sampler_logprobs
from stages.training.batches import padded_rows

_BATCH = 256
# Fields of a training's micro-batch that the objective does not read.
_UNREAD = dict.fromkeys(("weight", "num_tokens", "num_tokens_shared", "num_response_tokens"), 0)
_Known = dict[tuple[str, bytes], np.ndarray]


def first_step(asked: dict[str, Any], known: _Known) -> dict[str, float]:
    """Metrics of the objective over all pairs.

    Args:
        asked: `pairs`, paths of tables; `params` of the training; `code` of an own objective.
        known: log π_ref by prompt and tokens, where training has stored it.

    Raises:
        UserError: The sampler's log-probabilities, or those of a fixed reference, are not stored.
    """
    params = TrainParams.model_validate(asked["params"])
    pairs, _ = load_pairs([Path(each) for each in asked["pairs"]], params)
    reference = {
        pair.index: (known[_name(pair, pair.chosen)], known[_name(pair, pair.rejected)])
        for pair in pairs
        if all(_name(pair, each) in known for each in pair.sides)
    }
    if params.reference == "previous" or params.iteration == 1:
        # The policy is the reference.
        reference |= _sampled([pair for pair in pairs if pair.index not in reference])
        policy = reference
    else:
        pairs = [pair for pair in pairs if pair.index in reference]
        policy = _sampled(pairs)
    if not pairs:
        raise UserError(
            f"log π_ref of no pair is stored, and train.reference is {params.reference!r}",
            "leave `pair` and `generate` as the run has them, or set train.reference to 'previous'",
        )
    own = None
    if params.objective == "python":
        own = load_file(Path(asked["code"]), params.python.function, params.python.settings)
    sums_of = partial(_sums, pairs, policy, reference, params, own)
    may_vanish = params.numerics == "paper"
    controller = KappaController(params, has_bonus=params.has_bonus, may_vanish=may_vanish)
    if controller.calibrating:
        sums = dict(zip(METRIC_SUMS, sums_of(1.0).tolist(), strict=True))
        controller.observe(
            abs_loss_sum=sums["abs_preference_loss"], abs_bonus_sum=sums["abs_weighted_bonus"]
        )
    kappa = controller.kappa(step=0, num_steps=1, iteration=params.iteration)
    found = sums_of(kappa)
    gradient = found[METRIC_SUMS.index("gradient_of_bonus")].item() / len(pairs)
    further = {"kappa": kappa, "compared_pairs": len(pairs), "bonus_gradient": gradient}
    return step_metrics(found) | further


def _sums(
    pairs: Sequence[Pair],
    policy: RefLogprobs,
    reference: RefLogprobs,
    params: TrainParams,
    own: OwnTerms | None,
    kappa: float,
) -> torch.Tensor:
    total = torch.zeros(len(METRIC_SUMS), dtype=torch.float64)
    for start in range(0, len(pairs), _BATCH):
        batch = pairs[start : start + _BATCH]
        made = pair_batch(reference, batch, rows=padded_rows(batch), **_UNREAD)
        logp = padded_logprobs(batch, policy).requires_grad_()
        total += loss_and_metrics(*made.sides(logp), params, kappa, made.tie, own)[1]
    return total


def _sampled(pairs: Sequence[Pair]) -> RefLogprobs:
    try:
        return sampler_logprobs(pairs)
    except UserError as error:
        raise UserError(
            "log π of some pairs is not stored: a sampler gave none, or they are a data set's",
            "start a run with these settings",
        ) from error


def _name(pair: Pair, response: Response) -> tuple[str, bytes]:
    return pair.prompt_id, response.token_ids.tobytes()


def _stored(
    pairs: Sequence[Pair], reference: RefLogprobs, first: int
) -> Iterator[tuple[Any, np.ndarray]]:
    """Stored log π_ref of pairs, of which the training knew the first as number ``first``."""
    for pair in pairs:
        stored = reference.get(first + pair.index, ())
        for response, logprobs in zip(pair.sides, stored, strict=False):
            yield _name(pair, response), logprobs


def _answer(events: Emitter) -> None:
    """Answers the cases of a file: the run's own settings first, then those asked for."""
    asked = json.loads(Path(sys.argv[1]).read_text())
    found = []
    for own, other in asked["cases"]:
        pairs, _ = load_pairs(
            [Path(each) for each in own["pairs"]], TrainParams.model_validate(own["params"])
        )
        known = dict(_stored(pairs, read_reference([Path(own["reference"])]), own["first_pair"]))
        found.append(
            [first_step(each, known if each["reference"] else {}) for each in (own, other)]
        )
    Path(sys.argv[2]).write_text(dump_json(found))
    events.info(f"{len(found)} iterations")


if __name__ == "__main__":
    run_program(_answer)
