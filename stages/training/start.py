"""Start of a training by its stage, again with half the tokens if memory did not suffice."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Callable, Sequence
from typing import Any

from stages.contract.compilers import require_compiler
from stages.contract.context import StageContext
from stages.contract.errors import StageFailedError, UserError
from stages.training.job import Job, P, Process
from stages.training.params import TrainingParams

EXIT_OUT_OF_MEMORY = 75
"""Exit code of a worker that ran out of memory."""


class OutOfMemoryError(StageFailedError):
    """Training did not fit into memory; with fewer tokens at once it may."""


def with_half_the_tokens(
    job: Job[P], sizes: Sequence[int], said: str, *, global_batch: int, retry: bool
) -> Job[P]:
    """The same training with half the tokens in a micro-batch.

    The global batch stays, so the result does, too.

    Args:
        job: What ran out of memory.
        sizes: Tokens of each sample, its prompt once.
        said: The library's message.
        global_batch: Samples in a step.
        retry: Whether another attempt can be made.

    Raises:
        UserError: A smaller budget would not help, or the settings forbid one.
    """
    params = job.params
    sizes = sorted(sizes, reverse=True)
    longest = sizes[0]
    # Below that each sample is alone already.
    if retry and params.retry_out_of_memory and params.micro_batch_tokens > longest:
        # A budget above what a step has at all did not bind: half of it might not, either.
        bound = min(params.micro_batch_tokens, sum(sizes[:global_batch]))
        smaller = params.model_copy(update={"micro_batch_tokens": bound // 2})
        return dataclasses.replace(job, params=smaller)
    raise UserError(
        f"out of memory with {params.stage}.micro_batch_tokens = {params.micro_batch_tokens}; the "
        f"longest sample has {longest} tokens (its prompt once, and its responses): {said}",
        _remedy(params, longest),
    )


def _remedy(params: TrainingParams, longest: int) -> str:
    stage = params.stage
    ways = []
    if params.micro_batch_tokens > longest:
        ways.append(f"lower {stage}.micro_batch_tokens (to {longest} at least)")
    if not params.gradient_checkpointing:
        ways.append(f"set {stage}.gradient_checkpointing=true")
    ways.append(f"lower {stage}.max_length_tokens (below {longest})")
    if not params.in_shards:
        ways.append(f"spread the weights with {stage}.deepspeed.zero_stage=3 over more processes")
    elif params.sharding == "deepspeed" and not params.deepspeed.offload_optimizer:
        ways.append(f"set {stage}.deepspeed.offload_optimizer=true")
    if not params.lora.rank:
        ways.append(f"train adapters only ({stage}.lora.rank)")
    return ", or ".join(ways)


def train(
    ctx: StageContext[P],
    job: Job[P],
    load_fit: Callable[[], type[Any]],
    sizes: Callable[[Job[P]], Sequence[int]],
    *,
    global_batch: int,
) -> None:
    """Trains; anew with half the tokens at once if memory did not suffice.

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
