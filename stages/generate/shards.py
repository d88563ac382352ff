"""Bounds of shards: contiguous parts of the prompts with about the same expected work.

Shapes: ``N`` prompts.
"""

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow.compute as pc

from stages.tables.schemas import PROMPTS, read_batches

# UTF-8 bytes of one token: an estimate that needs no tokenizer and is fair to most scripts.
_BYTES_PER_TOKEN = 4

Tokens = npt.NDArray[np.int64]


def shard_bounds(tokens: Tokens, shard_index: int, num_shards: int) -> tuple[int, int]:
    """First prompt of a shard and the one after its last.

    A cut is made where it comes nearest to an equal share of the tokens, so that a shard is off by
    at most about one prompt. Shards are contiguous, together they are all prompts, and none is
    empty unless there are fewer prompts than shards. ``tokens`` are the expected work for each
    prompt, [N], positive.

    >>> [shard_bounds(np.array([9, 1, 1, 1, 3, 3]), index, 2) for index in range(2)]
    [(0, 1), (1, 6)]
    """
    num_prompts = len(tokens)
    if num_prompts <= num_shards:
        return min(shard_index, num_prompts), min(shard_index + 1, num_prompts)
    # In integers: every machine makes the same cuts.
    before = np.concatenate([[0], np.cumsum(tokens, dtype=np.int64)])
    total = int(before[-1])
    cuts = [0]
    for index in range(1, num_shards):
        share = total * index // num_shards
        place = int(np.searchsorted(before, share))
        if place > 0 and share - before[place - 1] <= before[place] - share:
            place -= 1
        # At least one prompt for this shard and for each of those after it.
        cuts.append(min(max(place, cuts[-1] + 1), num_prompts - (num_shards - index)))
    cuts.append(num_prompts)
    return cuts[shard_index], cuts[shard_index + 1]


def expected_tokens(prompts: Path, *, response_tokens: int, longest: int) -> Tokens:
    """Tokens that each prompt of a table and its responses will probably take, [N].

    Only messages are read, streaming. A prompt that is longer than ``longest`` does not fit the
    context, and counts as much; all responses to one take ``response_tokens``.
    """
    parts = [np.zeros(0, dtype=np.int64)]
    for batch in read_batches(prompts, PROMPTS, columns=["messages"]):
        messages = batch["messages"]
        sizes = pc.binary_length(messages.flatten().field("content")).to_numpy(zero_copy_only=False)
        rows = pc.list_parent_indices(messages).to_numpy()
        num_bytes = np.bincount(rows, weights=sizes, minlength=len(messages)).astype(np.int64)
        prompt_tokens = np.minimum(1 + num_bytes // _BYTES_PER_TOKEN, longest)
        parts.append(prompt_tokens + response_tokens)
    return np.concatenate(parts)
