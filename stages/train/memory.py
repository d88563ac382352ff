"""What to do where memory did not suffice: half the tokens at once, or a word of advice."""

from __future__ import annotations

import dataclasses

from stages.contract.errors import StageFailedError, UserError
from stages.train.data import load_pairs
from stages.train.job import Job

EXIT_OUT_OF_MEMORY = 75
"""Exit code with which a worker says so to its stage."""
# torch has no class of its own for the CPU's.
_CPU_MESSAGE = "DefaultCPUAllocator: can't allocate memory"


class OutOfMemoryError(StageFailedError):
    """Training did not fit into memory; with fewer tokens at once it may."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that memory, of a GPU or of the machine, ran out."""
    import torch

    kinds = (torch.OutOfMemoryError, MemoryError)
    return isinstance(error, kinds) or _CPU_MESSAGE in str(error)


def with_half_the_tokens(job: Job, said: str, *, retry: bool) -> Job:
    """The same training with half the tokens in a micro-batch.

    The global batch stays, so the result does, too.

    Args:
        job: What ran out of memory.
        said: The library's message.
        retry: Whether another attempt can be made.

    Raises:
        UserError: A smaller budget would not help, or the settings forbid one.
    """
    params = job.params
    pairs, _ = load_pairs(job.pairs, params)
    sizes = sorted((pair.num_tokens_shared for pair in pairs), reverse=True)
    longest = sizes[0]
    # Below that each pair is alone already.
    if retry and params.retry_out_of_memory and params.micro_batch_tokens > longest:
        # A budget above what a step has at all did not bind: half of it might not, either.
        bound = min(params.micro_batch_tokens, sum(sizes[: params.global_batch_pairs]))
        smaller = params.model_copy(update={"micro_batch_tokens": bound // 2})
        return dataclasses.replace(job, params=smaller)
    raise UserError(
        f"out of memory with train.micro_batch_tokens = {params.micro_batch_tokens}; the longest "
        f"pair has {longest} tokens (its prompt once, and both responses): {said}",
        _remedy(job, longest),
    )


def _remedy(job: Job, longest: int) -> str:
    params = job.params
    ways = []
    if params.micro_batch_tokens > longest:
        ways.append(f"lower train.micro_batch_tokens (to {longest} at least)")
    if not params.gradient_checkpointing:
        ways.append("set train.gradient_checkpointing=true")
    ways.append(f"lower train.max_length_tokens (now {params.max_length_tokens})")
    if params.deepspeed.zero_stage != 3:
        ways.append("spread the weights with train.deepspeed.zero_stage=3 over more processes")
    elif not params.deepspeed.offload_optimizer:
        ways.append("set train.deepspeed.offload_optimizer=true")
    if not params.lora.rank:
        ways.append("train adapters only (train.lora.rank)")
    return ", or ".join(ways)
