"""Stage `sft`: conversations, and a policy or an architecture, to a warm-started checkpoint."""

from __future__ import annotations

from typing import Any

from stages.contract.context import StageContext
from stages.contract.program import Stage
from stages.sft.params import SftParams
from stages.training.job import Job, make_job
from stages.training.start import train


def run(ctx: StageContext[SftParams]) -> None:
    """Trains a policy on conversations."""
    train(
        ctx,
        make_job(ctx, models=("policy",), files=("data",)),
        load_fit,
        _sizes,
        global_batch=ctx.params.global_batch_rows,
    )


def load_fit() -> type[Any]:
    """The stage's training; it imports transformers."""
    from stages.sft.fit import ConversationFit

    return ConversationFit


def _sizes(job: Job[SftParams]) -> list[int]:
    from stages.sft.fit import load_examples

    _, examples, _ = load_examples(job)
    return [example.num_tokens_shared for example in examples]


STAGE = Stage(SftParams, run)
