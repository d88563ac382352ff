"""Stage `train`: request to artifact."""

from __future__ import annotations

from typing import Any

from stages.contract.adapters import write_base
from stages.contract.context import StageContext
from stages.contract.program import Stage
from stages.train.data import load_pairs
from stages.train.params import TrainParams
from stages.training.job import Job, make_job
from stages.training.start import train


def run(ctx: StageContext[TrainParams]) -> None:
    """Trains a policy on preference pairs."""
    train(
        ctx,
        make_job(ctx, models=("policy", "reference"), files=("pairs",)),
        load_fit,
        _sizes,
        global_batch=ctx.params.global_batch_pairs,
    )
    if ctx.params.lora.save == "adapter":
        write_base(ctx.out / "checkpoint", ctx.inputs["policy"][0].source)


def load_fit() -> type[Any]:
    """The stage's training; it imports transformers."""
    from stages.train.fit import PairFit

    return PairFit


def _sizes(job: Job[TrainParams]) -> list[int]:
    pairs, _ = load_pairs(job.files["pairs"], job.params)
    return [pair.num_tokens_shared for pair in pairs]


STAGE = Stage(TrainParams, run)
