"""Start of a training by its stage, in this process or in one per device."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import Any

from stages.contract.compilers import require_compiler
from stages.contract.context import StageContext
from stages.training.job import Job, P, Process
from stages.training.memory import OutOfMemoryError, with_half_the_tokens


def train(
    ctx: StageContext[P],
    job: Job[P],
    load_fit: Callable[[], type[Any]],
    sizes: Callable[[Job[P]], Sequence[int]],
    *,
    global_batch: int,
) -> None:
    """Trains; anew with half the tokens at once where memory did not suffice.

    Args:
        ctx: The stage call.
        job: What is trained.
        load_fit: Gives the stage's subclass of `Fit`, which is slow to import.
        sizes: Tokens of each sample of a job, its prompt once.
        global_batch: Samples in a step.

    Raises:
        UserError: Parameters, models or data are wrong, or memory never suffices.
        StoppedError: SIGTERM came; a checkpoint is saved.
        StageFailedError: A worker failed.
    """
    if job.params.compile:
        require_compiler(job.params.stage, on_gpu=job.on_gpu)
    ctx.telemetry_path("metrics.jsonl")
    while True:
        try:
            _train_once(ctx, job, load_fit)
            return
        except OutOfMemoryError as error:
            said = str(error)
        smaller = with_half_the_tokens(
            job,
            sizes(job),
            said,
            global_batch=global_batch,
            # Another node's program has ended with its workers and would not come again.
            retry=ctx.resources.nodes == 1,
        )
        # Memory of the failed attempt is released only now that its exception is gone.
        gc.collect()
        ctx.events.warning(
            f"out of memory ({said}): going on with micro_batch_tokens = "
            f"{smaller.params.micro_batch_tokens} in place of {job.params.micro_batch_tokens}"
        )
        job = smaller


def _train_once(ctx: StageContext[P], job: Job[P], load_fit: Callable[[], type[Any]]) -> None:
    num_processes = ctx.resources.gpus or ctx.resources.processes
    several = num_processes > 1 or ctx.resources.nodes > 1
    if several or ctx.params.needs_workers:
        from stages.training.launch import train_in_workers

        train_in_workers(job, num_processes, ctx)
        return
    from stages.training.fit import run_fit

    with ctx.deferred_stop():
        run_fit(load_fit(), job, Process(0, 0, 1, ctx.events, lambda: ctx.stop_requested))
