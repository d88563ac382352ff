"""Out-of-memory fallback: halves the token budget, or names the settings to change."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from stages.contract.errors import StageFailedError, UserError
from stages.training.job import Job, P
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
