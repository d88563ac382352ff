"""The score stage: responses and an oracle to ``scores.parquet``."""

import time
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from stages.contract.errors import UserError
from stages.contract.events import Emitter
from stages.harness.context import StageContext
from stages.harness.program import Stage
from stages.score.oracle import Oracle, load_oracle
from stages.score.params import ScoreParams
from stages.tables.parts import Part
from stages.tables.schemas import (
    RESPONSES,
    SCORES,
    TableWriter,
    num_rows,
    read_batches,
    read_rows,
)

ScoreContext = StageContext[ScoreParams]
ResponseRow = dict[str, Any]
COLUMNS = ("prompt_id", "sample_index", "messages", "reference_answer", "response")
# Responses held in memory and given to the oracle at once.
BATCH_ROWS = 4096
# Seconds between two saves: a kill loses the answers of these seconds.
_SAVE_SECONDS = 5.0


def run(ctx: ScoreContext) -> None:
    """Scores each row of a responses table, in order and streaming.

    Inputs: ``responses`` (one RESPONSES table), ``code`` (a Python file for the oracle ``python``,
    a template for ``judge``), ``model`` (for the oracles that are one), ``opponents`` (a RESPONSES
    table with the same rows, for a judge that compares with them). Outputs: ``scores.parquet``
    (SCORES, row by row with the responses) and ``metrics.json``. What the oracle has said is kept
    in ``ctx.work``; a retry asks for the rest.
    """
    total = num_rows(ctx.path("responses"))
    oracle = load_oracle(ctx)
    ctx.events.progress(0, total, "responses")
    parts = []
    done = 0
    for rows in _read_prompts(ctx):
        part = Part(ctx.work, SCORES, done, done + len(rows))
        _ask(oracle, rows, part, ctx.events, total)
        done = part.stop
        parts.append(part.path)
    table = ctx.out / "scores.parquet"
    with TableWriter(table, SCORES) as writer:
        for batch in read_batches(parts, SCORES):
            writer.write_batch(batch)
    scored = pq.read_table(table, columns=["score", "error"])
    _check_nulls(ctx, scored)
    metrics = {**_statistics(scored["score"]), "oracle": oracle.identity}
    ctx.write_json("metrics.json", metrics)


def _statistics(scores: Any) -> dict[str, Any]:
    """Moments and range of a column of scores as JSON values; null without any score."""
    return {
        "responses": len(scores),
        "null_scores": scores.null_count,
        "mean": pc.mean(scores).as_py(),
        "min": pc.min(scores).as_py(),
        "max": pc.max(scores).as_py(),
        "std": pc.stddev(scores).as_py(),
    }


def _check_nulls(ctx: ScoreContext, scored: pa.Table) -> None:
    num_null = scored["score"].null_count
    if not num_null:
        return
    total = scored.num_rows
    first_error = pc.drop_null(scored["error"])[0]
    summary = f"{num_null} of {total} responses have no score (the first: {first_error})"
    if num_null > ctx.params.max_null_share * total:
        raise UserError(
            f"{summary}; max_null_share allows {ctx.params.max_null_share:g}",
            "remove what keeps the oracle from scoring (control tokens: set "
            "score.allow_control_tokens); or raise max_null_share to leave their prompts out of "
            "the pairs, and the oracle is asked for all of them again",
        )
    ctx.events.warning(f"{summary}; their prompts are left out of the pairs")


def _read_prompts(ctx: ScoreContext) -> Iterator[list[ResponseRow]]:
    """Yields rows of whole prompts, at least a batch of them until the last."""
    rows: list[ResponseRow] = []
    for row in _with_opponents(ctx):
        if len(rows) >= BATCH_ROWS and row["prompt_id"] != rows[-1]["prompt_id"]:
            yield rows
            rows = []
        rows.append(row)
    if rows:
        yield rows


def _with_opponents(ctx: ScoreContext) -> Iterator[ResponseRow]:
    """Rows of the responses, each with the text of the same row of the opponents if it has one."""
    rows = read_rows(ctx.path("responses"), RESPONSES, columns=COLUMNS)
    if not ctx.has("opponents"):
        yield from rows
        return
    others = read_rows(ctx.path("opponents"), RESPONSES, columns=COLUMNS)
    for row in rows:
        other = next(others, {})
        for name in ("prompt_id", "sample_index"):
            if row[name] != other.get(name):
                raise UserError(
                    f"the opponents' row for prompt {row['prompt_id']}, sample "
                    f"{row['sample_index']} has {name} {other.get(name)!r}",
                    "sample both on the same prompts, with the same number of samples and shards",
                )
        yield row | {"opponent": other["response"]}


def _read_known(
    part: Part, rows: Sequence[ResponseRow], warn: Callable[[str], None]
) -> dict[int, ResponseRow]:
    """The rows of SCORES that an attempt has left of a part, by their place in ``rows``.

    Prompts count as a whole: some oracles look at all responses of one. One with a response that
    has no score is asked about again.
    """
    saved = {_key(row): row for row in part.read(warn) if row["score"] is not None}
    by_place: dict[int, ResponseRow] = {}
    for _, prompt in groupby(range(len(rows)), lambda place: rows[place]["prompt_id"]):
        keys = {place: _key(rows[place]) for place in prompt}
        if saved.keys() >= set(keys.values()):
            by_place |= {place: saved[key] for place, key in keys.items()}
    return by_place


def _key(row: ResponseRow) -> tuple[str, int]:
    return row["prompt_id"], row["sample_index"]


def _ask(
    oracle: Oracle,
    rows: Sequence[ResponseRow],
    part: Part,
    events: Emitter,
    total: int,
) -> None:
    """Asks for what no attempt has left of a part, and keeps it there as it comes."""
    scored = _read_known(part, rows, events.warning)
    places = [place for place in range(len(rows)) if place not in scored]
    if not places:
        return
    save_at = time.monotonic() + _SAVE_SECONDS
    try:
        for index, verdict in oracle.score([rows[place] for place in places]):
            place = places[index]
            scored[place] = {
                "prompt_id": rows[place]["prompt_id"],
                "sample_index": rows[place]["sample_index"],
                "score": verdict.score,
                "error": verdict.error,
                "components": list(verdict.components.items()),
                "oracle": oracle.identity,
            }
            if time.monotonic() >= save_at:
                _save(scored, part)
                save_at = time.monotonic() + _SAVE_SECONDS
            events.progress(part.first + len(scored), total, "responses")
    finally:
        # Also when the oracle fails or the stage is stopped: answers are not to be paid for twice.
        _save(scored, part)
    assert len(scored) == len(rows)


def _save(scored: dict[int, ResponseRow], part: Part) -> None:
    part.save(scored[place] for place in sorted(scored))


STAGE = Stage(ScoreParams, run)
