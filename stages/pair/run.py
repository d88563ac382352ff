"""Pair: responses and scores in, ``pairs.parquet`` out.

Columns are gathered with Arrow; only scores pass through Python. Memory holds a
batch, and a few numbers for each response.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from stages.contract.digests import derive_seed
from stages.contract.errors import UserError
from stages.contract.events import dump_json
from stages.harness.context import StageContext
from stages.harness.program import Stage
from stages.pair.own_strategy import UserStrategy
from stages.pair.params import PairParams
from stages.pair.select import STRATEGIES, Selection
from stages.tables.join import ScoredBatch, read_scored
from stages.tables.schemas import PAIRS, TableWriter, num_rows

Array = npt.NDArray[np.float64]
# Column of the responses table -> column of the pairs table, for each side.
_SIDE_COLUMNS = {
    "sample_index": "sample_index",
    "response_token_ids": "token_ids",
    "response_logprobs": "logprobs",
    "finish_reason": "finish_reason",
}


def run(ctx: StageContext[PairParams]) -> None:
    """Makes the pairs of each prompt.

    Prompts of which a response has no score are left out: what could be compared would depend on
    what the oracle failed on.
    """
    responses = ctx.paths("responses")
    scores = ctx.paths("scores")
    total = num_rows(responses)
    tally = Tally()
    python = ctx.params.python
    is_own = ctx.params.strategy == "python"
    strategy = UserStrategy(ctx.path("code"), python.function, python.settings) if is_own else None
    parts = ("components",) if strategy else ()
    with TableWriter(ctx.out / "pairs.parquet", PAIRS) as writer:
        for batch in read_scored(responses, scores, score_columns=parts):
            pairs = pair_batch(batch, ctx.params, ctx.request.seed, tally, strategy)
            if pairs.num_rows:
                writer.write_batch(pairs)
            ctx.events.progress(tally.responses, total, "responses")
    _check_not_empty(tally)
    report: dict[str, Any] = tally.report()
    if ctx.params.truncated == "drop":
        report["prompts_cut_off"] = tally.prompts_cut_off
    (ctx.out / "metrics.json").write_text(dump_json(report))
    if tally.null_scores:
        ctx.events.warning(
            f"{tally.null_scores} of {tally.responses} responses have no score; their "
            f"{tally.prompts_with_null_score} prompts make no pair"
        )
    if warning := ctx.params.tie_warning(tally.pairs, tally.ties):
        ctx.events.warning(warning)


def pair_batch(
    batch: ScoredBatch,
    params: PairParams,
    seed: int,
    tally: Tally,
    own: UserStrategy | None = None,
) -> pa.Table:
    """The pairs of one batch of prompts, in the columns of the pairs table."""
    scores = batch.scores.to_numpy(zero_copy_only=False)
    tally.add(batch, scores)
    chosen = []
    rejected = []
    ties = []
    token_ids = batch.responses["response_token_ids"]
    select = _selector(batch, scores.tolist(), params, own)
    for better, worse in _selections(batch, scores.tolist(), params, seed, tally, select):
        same = token_ids[better] == token_ids[worse]
        tie = same or bool(scores[better] <= scores[worse])
        tally.ties += tie
        if tie and params.ties == "drop":
            continue
        chosen.append(better)
        rejected.append(worse)
        ties.append(tie)
    tally.pairs += len(chosen)
    tally.margins.append(scores[chosen] - scores[rejected])
    return _gather(batch, chosen, rejected, ties)


_Select = Callable[[Sequence[int], int], Selection]
"""(rows of a prompt's responses, seed) → places of the chosen and the rejected one among them."""


def _selector(
    batch: ScoredBatch, scores: list[float], params: PairParams, own: UserStrategy | None
) -> _Select:
    if own is not None:
        return own.over(batch)
    by_scores = STRATEGIES[params.strategy]
    return lambda rows, seed: by_scores([scores[row] for row in rows], seed)


def _selections(
    batch: ScoredBatch,
    scores: list[float],
    params: PairParams,
    seed: int,
    tally: Tally,
    select: _Select,
) -> Iterator[tuple[int, int]]:
    """Yields the rows of the chosen and the rejected response of each pair.

    Scores are of all rows, NaN if there is none. The tally gets the prompts left out, and the
    best scores.
    """
    best = []
    usable = _usable(batch, params)
    for prompt_id, (start, end) in zip(batch.prompt_ids, pairwise(batch.starts), strict=True):
        if end - start < 2:
            raise UserError(
                f"prompt {prompt_id} has one response; a pair wants two",
                "sample at least 2 responses a prompt",
            )
        if any(score != score for score in scores[start:end]):
            tally.prompts_with_null_score += 1
            continue
        best.append(max(scores[start:end]))
        rows = [row for row in range(start, end) if usable[row]]
        tally.prompts_cut_off += len(rows) < 2
        drawn = derive_seed(seed, "pair", prompt_id)
        yield from _disjoint(rows, select, params.pairs_per_prompt, drawn)
    tally.best.append(np.array(best))


def _usable(batch: ScoredBatch, params: PairParams) -> list[bool]:
    """A flag for each response: it may be in a pair."""
    if params.truncated == "keep":
        return [True] * batch.responses.num_rows
    whole = pc.not_equal(batch.responses["finish_reason"], "length")
    return list(whole.to_pylist())


def _disjoint(rows: list[int], select: _Select, most: int, seed: int) -> Iterator[tuple[int, int]]:
    """Yields pairs of one prompt's rows, each of responses that are in no pair before it.

    The seed is the first pair's; the others' are derived from it.
    """
    for number in range(most):
        if len(rows) < 2:
            return
        drawn = derive_seed(seed, "pair", str(number)) if number else seed
        better, worse = select(rows, drawn)
        yield rows[better], rows[worse]
        rows = [row for place, row in enumerate(rows) if place not in (better, worse)]


def _gather(
    batch: ScoredBatch, chosen: list[int], rejected: list[int], ties: list[bool]
) -> pa.Table:
    rows = batch.responses
    sides = {"chosen": pa.array(chosen, pa.int64()), "rejected": pa.array(rejected, pa.int64())}
    columns = {
        "prompt_id": rows["prompt_id"].take(sides["chosen"]),
        "prompt": rows["messages"].take(sides["chosen"]),
        "prompt_token_ids": rows["prompt_token_ids"].take(sides["chosen"]),
    }
    for side, indices in sides.items():
        columns[side] = _messages(rows["response"].take(indices))
        for source, target in _SIDE_COLUMNS.items():
            columns[f"{side}_{target}"] = rows[source].take(indices)
        columns[f"{side}_score"] = batch.scores.take(indices)
    columns["tie"] = pa.array(ties, pa.bool_())
    return pa.table({name: columns[name] for name in PAIRS.names}, schema=PAIRS)


def _messages(responses: Any) -> pa.Array:
    """A list with one message of the assistant for each response."""
    roles = pa.repeat("assistant", len(responses))
    messages = pa.StructArray.from_arrays(
        [roles, pa.array(responses.to_pylist(), pa.string())], ["role", "content"]
    )
    return pa.ListArray.from_arrays(pa.array(range(len(responses) + 1), pa.int32()), messages)


def _check_not_empty(tally: Tally) -> None:
    if tally.pairs:
        return
    raise UserError(
        f"no pair is left to train on: of {tally.prompts} prompts {tally.ties} make a tie, "
        f"{tally.prompts_with_null_score} have a response without a score, and "
        f"{tally.prompts_cut_off} fewer than two responses that may be in a pair",
        "ties: set `pair.ties: keep`, sample more responses a prompt, or use an oracle that tells "
        "the responses apart; no score: see the `error` column of scores.parquet; cut off, or no "
        "prompts: change `generate.max_new_tokens`",
    )


STAGE = Stage(PairParams, run)


@dataclass
class Tally:
    """Counts and means over all prompts."""

    prompts: int = 0
    responses: int = 0
    pairs: int = 0
    ties: int = 0
    null_scores: int = 0
    prompts_with_null_score: int = 0
    truncated: int = 0
    prompts_cut_off: int = 0
    rewards: list[Array] = field(default_factory=list)
    best: list[Array] = field(default_factory=list)
    margins: list[Array] = field(default_factory=list)
    lengths: list[Array] = field(default_factory=list)

    def add(self, batch: ScoredBatch, scores: Array) -> None:
        """Counts the responses of a batch of prompts; scores are NaN if there is none."""
        self.prompts += batch.num_prompts
        self.responses += batch.responses.num_rows
        self.null_scores += batch.scores.null_count
        self.rewards.append(scores[~np.isnan(scores)])
        lengths = pc.list_value_length(batch.responses["response_token_ids"])
        self.lengths.append(lengths.to_numpy().astype(np.float64))
        truncated = pc.equal(batch.responses["finish_reason"], "length")
        self.truncated += pc.sum(truncated).as_py() or 0

    def report(self) -> dict[str, float | int | None]:
        """Metrics of the stage."""
        return {
            "prompts": self.prompts,
            "responses": self.responses,
            "pairs": self.pairs,
            "ties": self.ties,
            "null_scores": self.null_scores,
            "prompts_with_null_score": self.prompts_with_null_score,
            "mean_reward": _joined(self.rewards, np.mean),
            "std_reward": _joined(self.rewards, np.std),
            "mean_best_reward": _joined(self.best, np.mean),
            "mean_margin": _joined(self.margins, np.mean),
            "mean_response_tokens": _joined(self.lengths, np.mean),
            "truncated_share": self.truncated / self.responses,
        }


def _joined(batches: Sequence[Array], statistic: Callable[[Array], Any]) -> float | None:
    """A statistic of the values of all batches; None without values."""
    values = np.concatenate(batches)
    return float(statistic(values)) if len(values) else None
