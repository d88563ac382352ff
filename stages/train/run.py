"""Stage `train`: request to artifact."""

from __future__ import annotations

from stages.contract.context import StageContext
from stages.contract.program import Stage
from stages.train.job import Job, Process
from stages.train.params import TrainParams


def run(ctx: StageContext[TrainParams]) -> None:
    """Trains in this process, or in one process per device."""
    job = make_job(ctx)
    ctx.telemetry_path("metrics.jsonl")
    num_processes = ctx.resources.gpus or ctx.resources.processes
    if num_processes > 1 or ctx.params.deepspeed.zero_stage != "off":
        from stages.train.launch import train_in_workers

        train_in_workers(job, num_processes, ctx)
    else:
        from stages.train.fit import fit

        with ctx.deferred_stop():
            fit(job, Process(0, 1, ctx.events, lambda: ctx.stop_requested))


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
