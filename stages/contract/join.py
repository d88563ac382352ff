"""The walk over responses and their scores, prompt by prompt, that pair and evaluate share.

Both tables hold the same rows in the same order, grouped by prompt; the walk checks that and yields
batches of whole prompts. Memory is bounded by a batch, whatever the tables' length.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from stages.contract.errors import UserError
from stages.contract.tables import RESPONSES, SCORES, read_batches

# A response of 2,000 tokens and its prompt take about 50 KiB here: some 100 MiB a batch.
BATCH_ROWS = 2048
_KEYS = ("prompt_id", "sample_index")


@dataclass(frozen=True)
class ScoredBatch:
    """The scored responses of some prompts.

    Attributes:
        responses: Columns of the responses table, [R] rows.
        scores: [R] float64; NaN where the oracle could not score.
        starts: [P + 1] first row of each of the P prompts, and R.
    """

    responses: pa.RecordBatch
    scores: npt.NDArray[np.float64]
    starts: npt.NDArray[np.int64]

    @property
    def num_prompts(self) -> int:
        """Number of prompts P."""
        return len(self.starts) - 1


def read_scored(
    responses: Sequence[Path],
    scores: Sequence[Path],
    *,
    columns: Sequence[str] | None = None,
    batch_rows: int = BATCH_ROWS,
) -> Iterator[ScoredBatch]:
    """Yields the responses of all shards with their scores, whole prompts in each batch.

    Args:
        responses: Responses tables; no prompt is in two of them.
        scores: Scores tables, in the same order.
        columns: Columns of the responses wanted; None for all.
        batch_rows: Rows read at a time. A prompt with more responses makes its batch larger.

    Raises:
        UserError: The tables are not each other's: counts, rows or their order differ, a score is
            not a number, or the rows of a prompt are not together.
    """
    if len(responses) != len(scores):
        raise UserError(
            f"{len(responses)} tables of responses but {len(scores)} of scores",
            "give the scores of every shard of responses, in the same order",
        )
    wanted = None if columns is None else list(dict.fromkeys([*_KEYS, *columns]))
    for responses_path, scores_path in zip(responses, scores, strict=True):
        yield from _read_shard(responses_path, scores_path, wanted, batch_rows)


def _read_shard(
    responses_path: Path, scores_path: Path, columns: list[str] | None, batch_rows: int
) -> Iterator[ScoredBatch]:
    left = _Rows(read_batches(responses_path, RESPONSES, columns=columns, batch_rows=batch_rows))
    right = _Rows(
        read_batches(scores_path, SCORES, columns=[*_KEYS, "score"], batch_rows=batch_rows)
    )
    held: pa.Table | None = None
    last_prompt = None
    while True:
        rows, scored = left.take(batch_rows), right.take(batch_rows)
        if rows.num_rows != scored.num_rows or any(
            not rows[key].equals(scored[key]) for key in _KEYS
        ):
            raise UserError(
                f"{scores_path} does not hold the scores of {responses_path}: "
                f"{_first_difference(rows, scored)}",
                "score these responses again, and give both in the same order of shards",
            )
        if rows.num_rows == 0:
            break
        joined = rows.append_column("score", scored["score"])
        held = joined if held is None else pa.concat_tables([held, joined])
        starts = _starts(held["prompt_id"])
        if starts[-2] > 0:
            # The last prompt may go on in the next batch.
            batch = _batch(held.slice(0, starts[-2]), starts[:-1], responses_path)
            yield batch
            held = held.slice(starts[-2])
        last_prompt = held
    if last_prompt is not None:
        yield _batch(last_prompt, _starts(last_prompt["prompt_id"]), responses_path)


class _Rows:
    """Rows of a stream of batches, taken in any portion."""

    def __init__(self, batches: Iterator[pa.RecordBatch]) -> None:
        self._batches = batches
        self._held: list[pa.RecordBatch] = []

    def take(self, count: int) -> pa.Table:
        """The next ``count`` rows, fewer at the end."""
        while sum(batch.num_rows for batch in self._held) < count:
            batch = next(self._batches, None)
            if batch is None:
                break
            self._held.append(batch)
        if not self._held:
            return pa.table({name: pa.array([], pa.null()) for name in _KEYS})
        table = pa.Table.from_batches(self._held)
        rest = table.slice(count)
        self._held = rest.to_batches() if rest.num_rows else []
        return table.slice(0, count)


def _starts(prompt_ids: pa.ChunkedArray) -> npt.NDArray[np.int64]:
    """[P + 1] first row of each run of equal ids, and the number of rows."""
    ids = prompt_ids.combine_chunks()
    changes = pc.not_equal(ids.slice(1), ids.slice(0, len(ids) - 1)).to_numpy(zero_copy_only=False)
    return np.concatenate([[0], 1 + np.flatnonzero(changes), [len(ids)]]).astype(np.int64)


def _batch(table: pa.Table, starts: npt.NDArray[np.int64], path: Path) -> ScoredBatch:
    scores = table["score"].to_numpy()
    if table["score"].null_count < np.count_nonzero(~np.isfinite(scores)):
        bad = pc.index(pc.is_finite(table["score"]), False).as_py()
        raise UserError(
            f"the score of response {table['sample_index'][bad]} to prompt "
            f"{table['prompt_id'][bad]} of {path} is {table['score'][bad]}",
            "correct the oracle: a score is a finite number, or null where there is none",
        )
    responses = table.drop_columns(["score"]).combine_chunks()
    return ScoredBatch(responses.to_batches()[0], scores, starts)


def _first_difference(left: pa.Table, right: pa.Table) -> str:
    names = [
        list(zip(*(table[key].to_pylist() for key in _KEYS), strict=True))
        for table in (left, right)
    ]
    for mine, other in zip(*names, strict=False):
        if mine != other:
            return f"prompt {mine[0]}, sample {mine[1]} meets prompt {other[0]}, sample {other[1]}"
    return "one of them has more rows"
