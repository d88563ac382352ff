"""log π_ref of every response token, computed before the first step.

Computed in parts that survive a failed attempt; each process computes a share of every part. Under
ZeRO-3 the reference lies in shards as the policy does, and both are never in memory at once.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import nn

from stages.modeling.token_batches import token_batches
from stages.tables.parts import split_parts
from stages.tables.schemas import read_rows
from stages.train.data import Pair, RefLogprobs
from stages.training.batches import ROWS
from stages.training.engine import Process
from stages.training.params import TrainingParams
from stages.training.policy import Numerics

PART_PAIRS = 512
"""Pairs in one part: what a killed attempt loses at most."""
FORWARD_FACTOR = 4
"""A pass without gradients holds few activations: it takes this multiple of the tokens at once."""

FILE = "reference_logprobs.parquet"
Gap = dict[str, float | None]

REFERENCE_LOGPROBS = pa.schema(
    [
        # Row of the pair among all rows of the stage's PAIRS tables, from 0.
        pa.field("pair_index", pa.int64(), nullable=False),
        pa.field("prompt_id", pa.string(), nullable=False),
        pa.field("chosen_logprobs", pa.list_(pa.float32()), nullable=False),
        pa.field("rejected_logprobs", pa.list_(pa.float32()), nullable=False),
    ],
    metadata={"table": "reference_logprobs"},
)


def compute_reference(
    pairs: Sequence[Pair],
    load_model: Callable[[], AbstractContextManager[nn.Module]],
    folder: Path,
    *,
    numerics: Numerics,
    params: TrainingParams,
    process: Process,
) -> RefLogprobs:
    """Computes log π_ref; all processes make as many passes, as weights in shards need.

    Args:
        pairs: all pairs.
        load_model: gives the reference model for the time of a block.
        folder: parts are kept here between attempts, and not computed again.
        numerics: the training's.
        params: layout of rows, and tokens of a pass.
        process: this process.
    """
    parts = split_parts(folder, REFERENCE_LOGPROBS, 0, len(pairs), PART_PAIRS)
    missing = []
    if process.is_first:
        warn = process.events.warning
        missing = [part for part in parts if len(part.read(warn)) < len(part)]
    missing, *_ = process.gathered(missing)
    if missing:
        with load_model() as model:
            for done, part in enumerate(missing):
                process.events.progress(done, len(missing), "parts", "reference log-probabilities")
                its_pairs = pairs[part.first : part.stop]
                logprobs: RefLogprobs = {}
                for share in process.gathered(_share(model, its_pairs, numerics, params, process)):
                    logprobs |= share
                if process.is_first:
                    part.save(reference_rows(its_pairs, logprobs))
    process.barrier()
    return read_reference([part.path for part in parts])


def _share(
    model: nn.Module,
    part: Sequence[Pair],
    numerics: Numerics,
    params: TrainingParams,
    process: Process,
) -> RefLogprobs:
    """This process's share of a part."""
    # Both responses of a pair, each after the prompt.
    lengths = [2 * pair.row_tokens for pair in part]
    batches = list(token_batches(lengths, params.token_budget * FORWARD_FACTOR))
    share: RefLogprobs = {}
    for first in range(0, len(batches), process.world_size):
        # A process for which none is left computes the last one, too.
        places = batches[min(first + process.rank, len(batches) - 1)]
        batch = [part[place] for place in places]
        rows = ROWS[params.row_layout](batch)
        with torch.no_grad(), numerics.forward_context():
            flat = rows.to(numerics.device).logprobs(model).cpu()
        by_row = [row.numpy() for row in flat.split(rows.response_mask.sum(dim=1).tolist())]
        for place, pair in enumerate(batch):
            share[pair.index] = by_row[place], by_row[len(batch) + place]
        process.check_stop(everywhere=True)
    return share


def read_reference(paths: Sequence[Path]) -> RefLogprobs:
    """Reads log π_ref by pair, of an artifact or of parts of one."""
    return {
        row["pair_index"]: (
            np.array(row["chosen_logprobs"], np.float32),
            np.array(row["rejected_logprobs"], np.float32),
        )
        for row in read_rows(paths, REFERENCE_LOGPROBS)
    }


def reference_rows(pairs: Sequence[Pair], reference: RefLogprobs) -> Iterator[dict[str, Any]]:
    """Rows of the artifact's table, or of a part of it, in the order of the pairs."""
    for pair in pairs:
        chosen, rejected = reference[pair.index]
        yield {
            "pair_index": pair.index,
            "prompt_id": pair.prompt_id,
            "chosen_logprobs": chosen,
            "rejected_logprobs": rejected,
        }


def difference_to_sampler(pairs: Sequence[Pair], reference: RefLogprobs) -> Gap:
    """Mean and maximum of |log π_ref − the sampler's log-probability| per response token, in nats.

    Large values mean different numerics. Both are None if the sampler's are not known.
    """
    total = 0.0
    largest = 0.0
    tokens = 0
    for pair in pairs:
        for response, logprobs in zip(pair.sides, reference[pair.index], strict=True):
            gaps = np.abs(response.logprobs.astype(np.float64) - logprobs)
            gaps = gaps[~np.isnan(gaps)]
            total += float(gaps.sum())
            largest = max(largest, float(gaps.max(initial=0.0)))
            tokens += len(gaps)
    return {"mean": total / tokens, "max": largest} if tokens else {"mean": None, "max": None}
