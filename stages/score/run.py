"""The score stage: responses and an oracle to ``scores.parquet``."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

from stages.contract.context import StageContext
from stages.contract.errors import UserError
from stages.contract.events import dump_json
from stages.contract.program import Stage
from stages.contract.tables import RESPONSES, SCORES, TableWriter, open_table, read_batches
from stages.score.answers import Answers, Row, Statistics, read_prompts
from stages.score.costs import JudgeCosts
from stages.score.oracle import Oracle, opened_oracle
from stages.score.params import ScoreParams

Context = StageContext[ScoreParams]


def run(ctx: Context) -> None:
    """Scores each row of a responses table, in order and streaming.

    Inputs: ``responses`` (one RESPONSES table), ``code`` (a Python file for the oracle ``python``,
    a template for ``judge``), ``model`` (for the oracles that are one), ``opponents`` (a RESPONSES
    table with the same rows, for a judge that compares with them). Outputs: ``scores.parquet``
    (SCORES, row by row with the responses) and ``metrics.json``. What the oracle has said is kept
    in ``ctx.work``; a retry asks for the rest.

    Raises:
        UserError: The oracle is wrong, or leaves too many responses without a score.
    """
    responses = ctx.path("responses")
    with open_table(responses, RESPONSES) as table:
        total = table.metadata.num_rows
    with opened_oracle(ctx) as oracle:
        identity = oracle.identity
        ctx.events.progress(0, total, "responses")
        parts = []
        done = asked = 0
        opponents = ctx.path("opponents") if ctx.has("opponents") else None
        for first, rows in read_prompts(responses, opponents, ctx.params.rows_per_batch):
            answers = Answers(ctx.work / f"{first:09d}-{first + len(rows):09d}.parquet")
            asked += _ask(ctx, oracle, rows, answers, done, total)
            done += len(rows)
            parts.append(answers.path)
    if asked < total:
        ctx.events.info(f"{total - asked} of {total} scores were there already")
    statistics = _assemble(ctx, parts)
    _check_nulls(ctx, statistics)
    metrics = {**statistics.summary(), "oracle": identity}
    (ctx.out / "metrics.json").write_text(dump_json(metrics))


def _ask(
    ctx: Context, oracle: Oracle, rows: list[Row], answers: Answers, done: int, total: int
) -> int:
    """Scores the rows whose scores are not known yet; returns their number.

    Progress counts responses from ``done`` towards ``total``.
    """
    known = answers.known(rows, ctx.events.warning)
    num_known = len(known)
    # Closed, it saves what it has, whatever ends the loop.
    with closing(answers.ask(oracle, rows, known)) as answered:
        for _ in answered:
            ctx.events.progress(done + len(known), total, "responses")
    assert len(known) == len(rows)
    return len(known) - num_known


def _assemble(ctx: Context, parts: list[Path]) -> Statistics:
    """Joins the parts into ``scores.parquet``."""
    statistics = Statistics()
    costs = JudgeCosts(ctx.params)
    with TableWriter(ctx.out / "scores.parquet", SCORES) as writer:
        for batch in read_batches(parts, SCORES):
            writer.write_batch(batch)
            for row in batch.select(["score", "error"]).to_pylist():
                statistics.add(row)
            costs.add(batch["components"])
    if "judge" in ctx.params.parts:
        ctx.telemetry_path("costs.json").write_text(dump_json(costs.summary()))
    return statistics


def _check_nulls(ctx: Context, statistics: Statistics) -> None:
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
            "remove what keeps the oracle from scoring, or raise max_null_share to leave their "
            "prompts out of the pairs",
        )
    ctx.events.warning(f"{what}; their prompts are left out of the pairs")


STAGE = Stage(ScoreParams, run)
