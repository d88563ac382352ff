"""The walk over responses and their scores, prompt by prompt, that pair and evaluate share.

Both tables hold the same rows in the same order, grouped by prompt; the walk checks that and yields
batches of whole prompts. Memory is bounded by a batch, whatever the tables' length.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, zip_longest
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from stages.contract.errors import UserError
from stages.tables.schemas import RESPONSES, SCORES, read_batches

# Rows read at a time. A response of 2,000 tokens and its prompt take about 50 KiB here: some
# 100 MiB a batch. A prompt with more responses makes its batch larger.
BATCH_ROWS = 2048
_KEYS = ("prompt_id", "sample_index")


@dataclass(frozen=True)
class ScoredBatch:
    """The scored responses of some prompts."""

    rows: pa.RecordBatch
    """[R] rows with the columns of both tables."""
    starts: list[int]
    """First row of each of the P prompts, and R: P + 1 numbers."""

    @property
    def scores(self) -> pa.DoubleArray:
        """[R] scores; null if the oracle could not score, finite elsewhere."""
        return self.rows["score"]

    def prompts(self) -> Iterator[tuple[str, int, int]]:
        """Id of each prompt, its first row, and the row after its last."""
        ids = self.rows["prompt_id"]
        for start, end in pairwise(self.starts):
            yield ids[start].as_py(), start, end


def read_scored(
    responses: Sequence[Path],
    scores: Sequence[Path],
    *,
    columns: Sequence[str] | None = None,
    score_columns: Sequence[str] = (),
) -> Iterator[ScoredBatch]:
    """Yields the responses of all shards with their scores, whole prompts in each batch.

    Args:
        responses: Responses tables; no prompt is in two of them, and the rows of one are together.
        scores: Scores tables, in the same order.
        columns: Columns of the responses wanted; None for all.
        score_columns: Columns of the scores in addition to the score itself.

    Raises:
        UserError: The tables are not each other's: rows or their order differ.
    """
    read_columns = None if columns is None else list(dict.fromkeys([*_KEYS, *columns]))
    read_scores = list(dict.fromkeys([*_KEYS, "score", *score_columns]))
    for responses_path, scores_path in zip(responses, scores, strict=True):
        yield from _read_shard(responses_path, scores_path, read_columns, read_scores)


def _read_shard(
    responses_path: Path,
    scores_path: Path,
    read_columns: list[str] | None,
    score_columns: list[str],
) -> Iterator[ScoredBatch]:
    held = None
    batches = zip_longest(
        read_batches(responses_path, RESPONSES, columns=read_columns, batch_rows=BATCH_ROWS),
        read_batches(scores_path, SCORES, columns=score_columns, batch_rows=BATCH_ROWS),
    )
    for response_batch, score_batch in batches:
        if not _have_same_keys(response_batch, score_batch):
            raise UserError(
                f"{scores_path} does not hold the scores of {responses_path}",
                "score these responses again, and give both in the same order of shards",
            )
        columns = {name: response_batch[name] for name in response_batch.schema.names}
        columns |= {name: score_batch[name] for name in score_batch.schema.names}
        rows = pa.table(columns)
        if held is not None:
            rows = pa.concat_tables([held, rows])
        starts = prompt_starts(rows["prompt_id"].combine_chunks())
        # The last prompt may go on in the next batch.
        whole = starts[-2]
        if whole > 0:
            yield _batch(rows.slice(0, whole), starts[:-1])
        held = rows.slice(whole)
    if held is not None:
        yield _batch(held, prompt_starts(held["prompt_id"].combine_chunks()))


def _have_same_keys(rows: pa.RecordBatch | None, scored: pa.RecordBatch | None) -> bool:
    """False also where one of the tables has ended."""
    if rows is None or scored is None:
        return False
    return all(rows[key].equals(scored[key]) for key in _KEYS)


def prompt_starts(ids: pa.StringArray) -> list[int]:
    """First row of each prompt, whose rows are together, and the number of rows."""
    return [0, *pc.run_end_encode(ids).run_ends.to_pylist()]


def _batch(rows: pa.Table, starts: list[int]) -> ScoredBatch:
    return ScoredBatch(rows.combine_chunks().to_batches()[0], starts)
