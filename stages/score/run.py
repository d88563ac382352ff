"""Responses and an oracle to ``scores.parquet``."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from stages.contract.context import StageContext
from stages.contract.errors import UserError
from stages.contract.events import dump_json
from stages.contract.program import Stage
from stages.contract.tables import RESPONSES, SCORES, TableWriter, open_table, read_batches
from stages.score.oracle import Verdict, load_oracle
from stages.score.params import ScoreParams

_COLUMNS = ("prompt_id", "sample_index", "messages", "reference_answer", "response")


def run(ctx: StageContext[ScoreParams]) -> None:
    """Scores each row of a responses table, in order and streaming.

    Inputs: ``responses`` (one RESPONSES table), ``code`` (a Python file, oracle ``python``) or
    ``model`` (oracle ``reward_model``). Outputs: ``scores.parquet`` (SCORES, row by row with the
    responses) and ``metrics.json``.

    Raises:
        UserError: The oracle is wrong, or leaves too many responses without a score.
    """
    responses = ctx.path("responses")
    with open_table(responses, RESPONSES) as table:
        total = table.metadata.num_rows
    oracle = load_oracle(ctx)
    statistics = Statistics()
    ctx.events.progress(0, total, "responses")
    with TableWriter(ctx.out / "scores.parquet", SCORES) as writer:
        for batch in read_batches(
            responses, RESPONSES, columns=_COLUMNS, batch_rows=ctx.params.rows_per_batch
        ):
            rows = batch.to_pylist()
            for row, verdict in zip(rows, oracle.score(rows), strict=True):
                statistics.add(verdict)
                writer.write(
                    {
                        "prompt_id": row["prompt_id"],
                        "sample_index": row["sample_index"],
                        "score": verdict.score,
                        "error": verdict.error,
                        "components": list(verdict.components.items()),
                        "oracle": oracle.identity,
                    }
                )
            ctx.events.progress(writer.num_rows, total, "responses")
    _check_nulls(ctx, statistics)
    metrics = {**statistics.summary(), "oracle": oracle.identity}
    (ctx.out / "metrics.json").write_text(dump_json(metrics))


def _check_nulls(ctx: StageContext[ScoreParams], statistics: Statistics) -> None:
    if not statistics.num_null:
        return
    total = statistics.num_null + statistics.num_scored
    what = (
        f"{statistics.num_null} of {total} responses have no score (the first: "
        f"{statistics.first_error})"
    )
    if statistics.num_null > ctx.params.max_null_share * total:
        raise UserError(
            f"{what}; max_null_share allows {ctx.params.max_null_share:g}",
            "mend what keeps the oracle from scoring them, or raise max_null_share to leave their "
            "prompts out of the pairs",
        )
    ctx.events.warning(f"{what}; their prompts are left out of the pairs")


@dataclass
class Statistics:
    """Mean and spread of a stream of scores, by Welford's update."""

    num_scored: int = 0
    num_null: int = 0
    first_error: str | None = None
    mean: float = 0.0
    lowest: float = math.inf
    highest: float = -math.inf
    _squares: float = 0.0

    def add(self, verdict: Verdict) -> None:
        """Takes one more verdict in."""
        if verdict.score is None:
            self.num_null += 1
            self.first_error = self.first_error or verdict.error
            return
        self.num_scored += 1
        distance = verdict.score - self.mean
        self.mean += distance / self.num_scored
        self._squares += distance * (verdict.score - self.mean)
        self.lowest = min(self.lowest, verdict.score)
        self.highest = max(self.highest, verdict.score)

    def summary(self) -> dict[str, Any]:
        """The statistics as JSON values; those of no score at all are null."""
        some = self.num_scored > 0
        return {
            "responses": self.num_scored + self.num_null,
            "null_scores": self.num_null,
            "mean": self.mean if some else None,
            "min": self.lowest if some else None,
            "max": self.highest if some else None,
            "std": math.sqrt(self._squares / self.num_scored) if some else None,
        }


STAGE = Stage(ScoreParams, run)
