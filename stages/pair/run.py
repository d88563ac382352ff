"""Pair: responses and scores in, ``pairs.parquet`` out.

Columns are gathered with Arrow; only scores pass through Python. Memory holds a
batch, and a few numbers for each response.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from stages.contract.digests import derive_seed
from stages.contract.errors import UserError
from stages.harness.context import StageContext
from stages.harness.program import Stage
from stages.pair.own_strategy import UserStrategy
from stages.pair.params import PairParams
from stages.pair.select import STRATEGIES, Selection
from stages.tables.join import ScoredBatch, read_scored
from stages.tables.schemas import PAIRS, TableWriter, num_rows

# Column of the responses table -> column of the pairs table, for each side.
_SIDE_COLUMNS = {
    "sample_index": "sample_index",
    "response_token_ids": "token_ids",
    "response_logprobs": "logprobs",
    "finish_reason": "finish_reason",
    "score": "score",
}
_Scores = npt.NDArray[np.float64]
_Select = Callable[[ScoredBatch, Sequence[int], int], Selection]
"""(batch, rows of one prompt, seed) → places of the chosen and the rejected one among the rows."""


def run(ctx: StageContext[PairParams]) -> None:
    """Makes the pairs of each prompt.

    Prompts of which a response has no score are left out: what could be compared would depend on
    what the oracle failed on.
    """
    responses = ctx.paths("responses")
    total = num_rows(responses)
    tally = Tally()
    select = _strategy(ctx)
    parts = ("components",) if ctx.params.strategy == "python" else ()
    with TableWriter(ctx.out / "pairs.parquet", PAIRS) as writer:
        for batch in read_scored(responses, ctx.paths("scores"), score_columns=parts):
            pairs = _pairs(ctx, batch, select, tally)
            if pairs.num_rows:
                writer.write_batch(pairs)
            ctx.events.progress(tally.responses, total, "responses")
    if not tally.margins:
        raise UserError(
            f"no pair is left to train on: of {tally.prompts} prompts {tally.ties} make a tie, "
            f"{tally.prompts_with_null_score} have a response without a score, and "
            f"{tally.prompts_cut_off} fewer than two responses that may be in a pair",
            "ties: set `pair.ties: keep`, sample more responses a prompt, or use an oracle that "
            "tells the responses apart; no score: see the `error` column of scores.parquet; cut "
            "off, or no prompts: change `generate.max_new_tokens`",
        )
    report = tally.report()
    if ctx.params.truncated == "drop":
        report["prompts_cut_off"] = tally.prompts_cut_off
    ctx.write_json("metrics.json", report)
    if tally.null_scores:
        ctx.events.warning(
            f"{tally.null_scores} of {total} responses have no score; their "
            f"{tally.prompts_with_null_score} prompts make no pair"
        )
    if warning := ctx.params.tie_warning(len(tally.margins), tally.ties):
        ctx.events.warning(warning)


def _strategy(ctx: StageContext[PairParams]) -> _Select:
    params = ctx.params
    if params.strategy == "python":
        function = params.python.function
        return UserStrategy(ctx.path("code"), function, params.python.settings).select_rows
    by_scores = STRATEGIES[params.strategy]

    def select(batch: ScoredBatch, rows: Sequence[int], seed: int) -> Selection:
        return by_scores(batch.scores.take(pa.array(rows)).to_pylist(), seed)

    return select


def _pairs(
    ctx: StageContext[PairParams], batch: ScoredBatch, select: _Select, tally: Tally
) -> pa.Table:
    """The pairs of one batch of prompts, in the columns of the pairs table."""
    scores = batch.scores.to_numpy(zero_copy_only=False)
    tally.add(batch, scores)
    token_ids = batch.rows["response_token_ids"]
    chosen = []
    rejected = []
    ties = []
    for prompt_id, rows in _comparable(batch, scores, ctx.params, tally):
        seed = derive_seed(ctx.request.seed, "pair", prompt_id)
        for better, worse in _disjoint(batch, rows, select, ctx.params.pairs_per_prompt, seed):
            same = token_ids[better] == token_ids[worse]
            tie = same or bool(scores[better] <= scores[worse])
            tally.ties += tie
            if tie and ctx.params.ties == "drop":
                continue
            chosen.append(better)
            rejected.append(worse)
            ties.append(tie)
    tally.margins.extend((scores[chosen] - scores[rejected]).tolist())
    return _gather(batch, chosen, rejected, ties)


def _comparable(
    batch: ScoredBatch, scores: _Scores, params: PairParams, tally: Tally
) -> Iterator[tuple[str, list[int]]]:
    """Yields each prompt whose responses all have scores, with the rows that may be in a pair.

    Scores are of all rows, NaN if there is none. The tally gets the prompts left out.
    """
    reasons = batch.rows["finish_reason"].to_pylist()
    for prompt_id, start, end in batch.prompts():
        if np.isnan(scores[start:end]).any():
            tally.prompts_with_null_score += 1
            continue
        rows = list(range(start, end))
        if params.truncated == "drop":
            rows = [row for row in rows if reasons[row] != "length"]
        tally.prompts_cut_off += len(rows) < 2
        yield prompt_id, rows


def _disjoint(
    batch: ScoredBatch, rows: list[int], select: _Select, most: int, seed: int
) -> Iterator[tuple[int, int]]:
    """Yields pairs of one prompt's rows, each of responses that are in no pair before it.

    The seed is the first pair's; the others' are derived from it.
    """
    for number in range(most):
        if len(rows) < 2:
            return
        drawn = derive_seed(seed, "pair", str(number)) if number else seed
        better, worse = select(batch, rows, drawn)
        yield rows[better], rows[worse]
        rows = [row for place, row in enumerate(rows) if place not in (better, worse)]


def _gather(
    batch: ScoredBatch, chosen: list[int], rejected: list[int], ties: list[bool]
) -> pa.Table:
    rows = batch.rows
    sides = {
        "chosen": pa.array(chosen, pa.int64()),
        "rejected": pa.array(rejected, pa.int64()),
    }
    columns = {
        "prompt_id": rows["prompt_id"].take(sides["chosen"]),
        "prompt": rows["messages"].take(sides["chosen"]),
        "prompt_token_ids": rows["prompt_token_ids"].take(sides["chosen"]),
        "tie": ties,
    }
    for side, indices in sides.items():
        columns[side] = _messages(rows["response"].take(indices))
        for source, target in _SIDE_COLUMNS.items():
            columns[f"{side}_{target}"] = rows[source].take(indices)
    return pa.table(columns, schema=PAIRS)


def _messages(responses: pa.StringArray) -> pa.Array:
    """A list with one message of the assistant for each response."""
    roles = pa.repeat("assistant", len(responses))
    messages = pa.StructArray.from_arrays([roles, responses], ["role", "content"])
    offsets = pa.array(range(len(responses) + 1), pa.int32())
    return pa.ListArray.from_arrays(offsets, messages)


STAGE = Stage(PairParams, run)


@dataclass
class Tally:
    """Counts and values over all prompts."""

    prompts: int = 0
    responses: int = 0
    tokens: int = 0
    ties: int = 0
    prompts_with_null_score: int = 0
    prompts_cut_off: int = 0
    rewards: list[float] = field(default_factory=list)
    """Scores of the responses that have one."""
    margins: list[float] = field(default_factory=list)
    """Difference of the scores of each pair."""

    @property
    def null_scores(self) -> int:
        """Number of responses without a score."""
        return self.responses - len(self.rewards)

    def add(self, batch: ScoredBatch, scores: _Scores) -> None:
        """Counts the responses of a batch of prompts; scores are NaN if there is none."""
        self.prompts += len(batch.starts) - 1
        self.responses += len(scores)
        self.tokens += len(batch.rows["response_token_ids"].flatten())
        self.rewards.extend(scores[~np.isnan(scores)].tolist())

    def report(self) -> dict[str, float]:
        """Metrics of the stage, which has a pair."""
        return {
            "prompts": self.prompts,
            "responses": self.responses,
            "pairs": len(self.margins),
            "ties": self.ties,
            "null_scores": self.null_scores,
            "prompts_with_null_score": self.prompts_with_null_score,
            "mean_reward": float(np.mean(self.rewards)),
            "mean_margin": float(np.mean(self.margins)),
            "mean_response_tokens": self.tokens / self.responses,
        }
