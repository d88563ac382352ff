"""Stage `train`: request to artifact."""

from __future__ import annotations

import gc

from stages.contract.context import StageContext
from stages.contract.program import Stage
from stages.train.job import Job, Process
from stages.train.memory import OutOfMemoryError, with_half_the_tokens
from stages.train.params import TrainParams


def run(ctx: StageContext[TrainParams]) -> None:
    """Trains in this process, or in one process per device; anew where memory did not suffice."""
    job: Job | None = make_job(ctx)
    ctx.telemetry_path("metrics.jsonl")
    while job is not None:
        job = _train(job, ctx)


def _train(job: Job, ctx: StageContext[TrainParams]) -> Job | None:
    """Trains once; returns what to try next where memory ran out."""
    num_processes = ctx.resources.gpus or ctx.resources.processes
    several = num_processes > 1 or ctx.resources.nodes > 1
    try:
        if several or ctx.params.deepspeed.zero_stage != "off":
            from stages.train.launch import train_in_workers

            train_in_workers(job, num_processes, ctx)
        else:
            from stages.train.fit import fit

            with ctx.deferred_stop():
                fit(job, Process(0, 0, 1, ctx.events, lambda: ctx.stop_requested))
        return None
    except OutOfMemoryError as error:
        said = str(error)
    # Another node's program has ended with its workers and would not come again.
    smaller = with_half_the_tokens(job, said, retry=ctx.resources.nodes == 1)
    # What the failed attempt held is released only now that its exception is gone.
    gc.collect()
    ctx.events.warning(
        f"out of memory ({said}): going on with micro_batch_tokens = "
        f"{smaller.params.micro_batch_tokens} in place of {job.params.micro_batch_tokens}"
    )
    return smaller


def make_job(ctx: StageContext[TrainParams]) -> Job:
    """What every process of the training needs to know."""
    policy, reference = ctx.model("policy"), ctx.model("reference")
    digests = {each.source.digest for name in ("policy", "reference") for each in ctx.inputs[name]}
    return Job(
        params=ctx.params,
        seed=ctx.seed,
        policy=policy,
        reference=reference,
        same_model=len(digests) == 1,
        pairs=tuple(ctx.paths("pairs")),
        out=ctx.out,
        work=ctx.work,
        logs=ctx.store.log_path(TrainParams.stage, ctx.work.name),
        on_gpu=ctx.resources.gpus > 0,
        run=ctx.run,
    )


STAGE = Stage(TrainParams, run)
