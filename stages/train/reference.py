"""log π_ref of every response token, known before the first step, and the average of references.

Computed in parts that survive a failed attempt; each process computes its share of them. Under
ZeRO-3 the reference lies in shards as the policy does, and both are never in memory at once.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import nn

from stages.contract.atomic import atomic_path
from stages.contract.errors import UserError
from stages.harness.context import ModelSource
from stages.modeling.load import load_causal_lm
from stages.modeling.save import save_checkpoint
from stages.modeling.token_batches import token_batches
from stages.tables.schemas import TableWriter, read_rows
from stages.train.data import Pair, RefLogprobs
from stages.training.batches import ROWS
from stages.training.engine import Process
from stages.training.params import RowLayoutName, TrainingParams
from stages.training.policy import Numerics

PART_PAIRS = 512
"""Pairs in one part: what a killed attempt loses at most, per process."""
FORWARD_FACTOR = 4
"""A pass without gradients holds few activations: it takes so many times the tokens at once."""

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


@dataclass(frozen=True)
class ReferencePass:
    """Computation of log π_ref; if weights lie in shards, all processes make as many passes."""

    load_model: Callable[[], AbstractContextManager[nn.Module]]
    """Gives the reference model for the time of a block."""
    folder: Path
    """Folder in which parts are kept between attempts."""
    numerics: Numerics
    params: TrainingParams
    process: Process

    def run(self, pairs: Sequence[Pair]) -> None:
        """Writes the parts of this process that the folder lacks; loads the model only for them."""
        self.folder.mkdir(parents=True, exist_ok=True)
        shares = self._shares(len(pairs))
        own = shares[self.process.rank]
        if not any(shares) or not (own or self.params.in_shards):
            return
        with self.load_model() as model:
            self._write_parts(model, pairs, own)
            if self.params.in_shards:
                # Others have more to do, and need this process for each of their passes.
                passes = [self._num_passes(pairs, share) for share in shares]
                shortest = [min(pairs, key=lambda pair: pair.num_tokens_shared)]
                for _ in range(max(passes) - passes[self.process.rank]):
                    self._pass(model, shortest)

    def _shares(self, num_pairs: int) -> list[list[int]]:
        """First pairs of the parts that each process is to write."""
        missing = []
        if self.process.is_first:
            # The first process's view: on a shared file system others may see less.
            starts = range(0, num_pairs, PART_PAIRS)
            missing = [start for start in starts if not _part(self.folder, start).exists()]
        missing = self.process.agreed(missing)
        world = self.process.world_size
        return [missing[first::world] for first in range(world)]

    def _write_parts(self, model: nn.Module, pairs: Sequence[Pair], starts: Sequence[int]) -> None:
        total = sum(len(pairs[start : start + PART_PAIRS]) for start in starts)
        done = 0
        for start in starts:
            part = pairs[start : start + PART_PAIRS]
            found: RefLogprobs = {}
            for places in self._batches(part):
                found |= self._pass(model, [part[place] for place in places])
                done += len(places)
                self.process.events.progress(done, total, "pairs", "reference log-probabilities")
            with atomic_path(_part(self.folder, start), durable=True) as scratch:
                write_reference(scratch, part, found)

    def _num_passes(self, pairs: Sequence[Pair], starts: Sequence[int]) -> int:
        parts = (pairs[start : start + PART_PAIRS] for start in starts)
        return sum(1 for part in parts for _ in self._batches(part))

    def _batches(self, part: Sequence[Pair]) -> Iterator[list[int]]:
        # Both responses of a pair, each after the prompt.
        lengths = [2 * pair.num_tokens for pair in part]
        return token_batches(lengths, self.params.token_budget * FORWARD_FACTOR)

    def _pass(self, model: nn.Module, batch: Sequence[Pair]) -> RefLogprobs:
        with torch.no_grad(), self.numerics.forward_context():
            found = _logprobs(model, batch, self.params.row_layout, self.numerics.device)
        self.process.check_stop(self.numerics.device if self.params.in_shards else None)
        return found


def sampler_logprobs(pairs: Sequence[Pair]) -> RefLogprobs:
    """The sampler's own log-probabilities, in place of the reference model's."""
    for pair in pairs:
        if any(np.isnan(each.logprobs).any() for each in pair.sides):
            raise UserError(
                f"pair {pair.index}: the sampler's log-probabilities are not known, or not after a "
                "prompt that is cut to max_prompt_tokens; train.reference_logprobs is 'sampler'",
                "set train.reference_logprobs to 'model'; or sample with a backend that gives them "
                "and raise train.max_prompt_tokens",
            )
    return {pair.index: (pair.chosen.logprobs, pair.rejected.logprobs) for pair in pairs}


def read_reference(paths: Sequence[Path]) -> RefLogprobs:
    """Reads log π_ref by pair, of an artifact or of parts of one."""
    found: RefLogprobs = {}
    for row in read_rows(paths, REFERENCE_LOGPROBS):
        chosen, rejected = (
            np.array(row[f"{side}_logprobs"], dtype=np.float32) for side in ("chosen", "rejected")
        )
        found[row["pair_index"]] = chosen, rejected
    return found


def write_reference(path: Path, pairs: Sequence[Pair], reference: RefLogprobs) -> None:
    """Writes a table, the artifact's or a part of it, in the order of the pairs."""
    with TableWriter(path, REFERENCE_LOGPROBS) as writer:
        for pair in pairs:
            chosen, rejected = reference[pair.index]
            writer.write(
                {
                    "pair_index": pair.index,
                    "prompt_id": pair.prompt_id,
                    "chosen_logprobs": chosen,
                    "rejected_logprobs": rejected,
                }
            )


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


def _logprobs(
    model: nn.Module, batch: Sequence[Pair], layout: RowLayoutName, device: torch.device
) -> RefLogprobs:
    rows = ROWS[layout](batch)
    flat = rows.to(device).logprobs(model).cpu()
    lengths = rows.response_mask.sum(dim=1).tolist()
    by_row = [row.numpy() for row in flat.split(lengths)]
    return {
        pair.index: (by_row[place], by_row[len(batch) + place]) for place, pair in enumerate(batch)
    }


def _part(folder: Path, start: int) -> Path:
    return folder / f"part-{start:09d}.parquet"


def save_average(
    reference: ModelSource,
    checkpoint: Path,
    tokenizer: Any,
    *,
    decay: float,
    folder: Path,
) -> None:
    """Writes decay · reference + (1 − decay) · trained policy, the next reference.

    In float32: most steps of an average are too small for weights of 16 bits, which they leave.
    """
    average, policy = (
        load_causal_lm(source, dtype="float32", device=torch.device("cpu"))
        for source in (reference, ModelSource(str(checkpoint)))
    )
    trained = dict(policy.named_parameters())
    averaged = {
        id(weight): weight.detach().lerp(trained[name].detach(), 1.0 - decay)
        for name, weight in average.named_parameters()
    }
    state = average.state_dict(keep_vars=True)
    weights = {name: averaged.get(id(weight), weight) for name, weight in state.items()}
    save_checkpoint(average, weights, tokenizer, torch.float32, folder)
