"""Pair: responses and scores in, ``pairs.parquet`` out.

Columns are gathered with Arrow; only scores pass through Python. Memory is bounded by a batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from stages.contract.context import StageContext
from stages.contract.digests import derive_seed
from stages.contract.errors import UserError
from stages.contract.events import dump_json
from stages.contract.join import ScoredBatch, read_scored
from stages.contract.program import Stage
from stages.contract.tables import PAIRS, TableWriter, num_rows
from stages.pair.params import PairParams
from stages.pair.select import STRATEGIES

# Column of the responses table -> column of the pairs table, for each side.
_SIDE_COLUMNS = {
    "sample_index": "sample_index",
    "response_token_ids": "token_ids",
    "response_logprobs": "logprobs",
    "response": "response",
    "finish_reason": "finish_reason",
}
_PROMPT_COLUMNS = ("prompt_id", "messages", "prompt_token_ids")


@dataclass
class _Moments:
    """Count, sum and sum of squares of values that come in batches.

    Squares are taken of distances from the first value, so that a large common offset of the scores
    does not cost digits.
    """

    count: int = 0
    total: float = 0.0
    squares: float = 0.0
    origin: float | None = None

    def add(self, values: npt.NDArray[np.float64]) -> None:
        """Adds a batch."""
        if len(values) == 0:
            return
        if self.origin is None:
            self.origin = float(values[0])
        shifted = values - self.origin
        self.count += len(values)
        self.total += float(shifted.sum())
        self.squares += float(np.square(shifted).sum())

    @property
    def mean(self) -> float | None:
        """Mean; None of nothing."""
        if self.origin is None:
            return None
        return self.origin + self.total / self.count

    @property
    def std(self) -> float | None:
        """Standard deviation (of the population); None of nothing."""
        if self.origin is None:
            return None
        variance = self.squares / self.count - (self.total / self.count) ** 2
        return max(variance, 0.0) ** 0.5


@dataclass
class _Tally:
    """Counts and means over all prompts."""

    prompts: int = 0
    responses: int = 0
    pairs: int = 0
    ties: int = 0
    null_scores: int = 0
    prompts_with_null_score: int = 0
    truncated: int = 0
    rewards: _Moments = field(default_factory=_Moments)
    best: _Moments = field(default_factory=_Moments)
    margins: _Moments = field(default_factory=_Moments)
    lengths: _Moments = field(default_factory=_Moments)


def run(ctx: StageContext[PairParams]) -> None:
    """Makes at most one pair of each prompt.

    Prompts of which a response has no score are left out: what could be compared would depend on
    what the oracle failed on.

    Raises:
        UserError: The tables do not belong together, a prompt has one response only, or no pair is
            left.
    """
    responses, scores = ctx.paths("responses"), ctx.paths("scores")
    total = num_rows(responses)
    tally = _Tally()
    with TableWriter(ctx.out / "pairs.parquet", PAIRS) as writer:
        for batch in read_scored(responses, scores):
            pairs = pair_batch(batch, ctx.params, ctx.seed, tally)
            if pairs.num_rows:
                writer.write_batch(pairs)
            ctx.events.progress(tally.responses, total, "responses")
    _check_not_empty(tally)
    report = _report(tally)
    (ctx.out / "metrics.json").write_text(dump_json(report))
    ctx.notes.update({name: report[name] for name in ("prompts", "pairs", "ties", "null_scores")})
    if tally.null_scores:
        ctx.events.warning(
            f"{tally.null_scores} of {tally.responses} responses have no score; their "
            f"{tally.prompts_with_null_score} prompts make no pair"
        )


def pair_batch(batch: ScoredBatch, params: PairParams, seed: int, tally: _Tally) -> pa.Table:
    """The pairs of one batch of prompts, in the columns of the pairs table."""
    _count(batch, tally)
    chosen, rejected, ties = [], [], []
    for first, selection in _selections(batch, params, seed, tally):
        better, worse = first + selection[0], first + selection[1]
        margin = float(batch.scores[better] - batch.scores[worse])
        tie = margin <= params.tie_margin
        tally.ties += tie
        if tie and params.ties == "drop":
            continue
        chosen.append(better)
        rejected.append(worse)
        ties.append(tie)
    tally.pairs += len(chosen)
    tally.margins.add(batch.scores[chosen] - batch.scores[rejected])
    return _gather(batch, np.array(chosen, np.int64), np.array(rejected, np.int64), ties)


def _selections(
    batch: ScoredBatch, params: PairParams, seed: int, tally: _Tally
) -> Iterator[tuple[int, tuple[int, int]]]:
    """Yields the first row of each prompt that can make a pair, and the selection within it."""
    select = STRATEGIES[params.strategy]
    prompt_ids = batch.responses["prompt_id"].take(pa.array(batch.starts[:-1])).to_pylist()
    missing = np.isnan(batch.scores)
    values = batch.scores.tolist()
    bounds = batch.starts.tolist()
    for prompt_id, start, end in zip(prompt_ids, bounds[:-1], bounds[1:], strict=True):
        if end - start < 2:
            raise UserError(
                f"prompt {prompt_id} has one response; a pair wants two",
                "sample at least 2 responses a prompt (`generate.num_samples` or its like)",
            )
        if missing[start:end].any():
            tally.prompts_with_null_score += 1
            continue
        scores = values[start:end]
        tally.best.add(np.array([max(scores)]))
        yield start, select(scores, derive_seed(seed, "pair", prompt_id))


def _count(batch: ScoredBatch, tally: _Tally) -> None:
    tally.prompts += batch.num_prompts
    tally.responses += batch.responses.num_rows
    tally.null_scores += int(np.isnan(batch.scores).sum())
    tally.rewards.add(batch.scores[~np.isnan(batch.scores)])
    lengths = pc.list_value_length(batch.responses["response_token_ids"])
    tally.lengths.add(lengths.to_numpy().astype(np.float64))
    truncated = pc.equal(batch.responses["finish_reason"], "length")
    tally.truncated += pc.sum(truncated).as_py() or 0


def _gather(
    batch: ScoredBatch,
    chosen: npt.NDArray[np.int64],
    rejected: npt.NDArray[np.int64],
    ties: list[bool],
) -> pa.Table:
    rows = batch.responses
    columns = {name: rows[name].take(pa.array(chosen)) for name in _PROMPT_COLUMNS}
    for side, indices in (("chosen", chosen), ("rejected", rejected)):
        for source, target in _SIDE_COLUMNS.items():
            columns[f"{side}_{target}"] = rows[source].take(pa.array(indices))
        columns[f"{side}_score"] = pa.array(batch.scores[indices])
    columns["tie"] = pa.array(ties, pa.bool_())
    return pa.table({name: columns[name] for name in PAIRS.names}, schema=PAIRS)


def _check_not_empty(tally: _Tally) -> None:
    if tally.pairs:
        return
    if tally.prompts == 0:
        raise UserError("there are no responses to pair", "check the prompts and the generation")
    if tally.ties:
        raise UserError(
            f"all {tally.ties} pairs are ties, and ties are dropped: nothing is left to train on",
            "set `pair.ties: keep`, sample at a higher temperature or more responses a prompt, or "
            "use an oracle that tells the responses apart",
        )
    raise UserError(
        f"no prompt has a score for every response ({tally.null_scores} of {tally.responses} "
        "responses have none)",
        "see the `error` column of scores.parquet for what the oracle said",
    )


def _report(tally: _Tally) -> dict[str, float | int | None]:
    return {
        "prompts": tally.prompts,
        "responses": tally.responses,
        "pairs": tally.pairs,
        "ties": tally.ties,
        "null_scores": tally.null_scores,
        "prompts_with_null_score": tally.prompts_with_null_score,
        "mean_reward": tally.rewards.mean,
        "std_reward": tally.rewards.std,
        "mean_best_reward": tally.best.mean,
        "mean_margin": tally.margins.mean,
        "mean_response_tokens": tally.lengths.mean,
        "truncated_share": tally.truncated / tally.responses,
    }


STAGE = Stage(PairParams, run)
