"""Arrow schemas of everything that crosses a stage border, and streaming readers and writers.

Rows of ``responses`` and ``scores`` come grouped by prompt and in the same order, so that a join is
a walk over both and memory does not grow with the number of prompts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from stages.contract.data_files import open_parquet
from stages.contract.errors import UserError

ROWS_PER_GROUP = 4096

_TOKENS = pa.list_(pa.int32())
_LOGPROBS = pa.list_(pa.float32())


class Column(NamedTuple):
    """One column of a table.

    The schema's metadata does not hold its meaning: a file's bytes, and so its digest, would
    change with it.
    """

    kind: pa.DataType
    meaning: str
    optional: bool = False


_ID = Column(pa.string(), "Identifier of the prompt: a digest of its messages.")
_INDEX = Column(pa.int32(), "Number of the response among those to its prompt, from 0.")
_MESSAGES = Column(
    pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())])),
    "Chat messages of the prompt.",
)
_ANSWER = Column(pa.string(), "Reference answer, for oracles that compare.", optional=True)
_PROMPT_TOKENS = Column(_TOKENS, "The prompt under the policy's chat template.")
_FINISH = Column(
    pa.string(), "`stop` where the policy ended the response, `length` where the limit cut it off."
)
_MODEL = Column(pa.string(), "`policy` or `base`.")
_FIGURE = Column(pa.string(), "Name of the figure.")
_SIDE = {
    "sample_index": _INDEX,
    "token_ids": Column(_TOKENS, "Sampled tokens."),
    "logprobs": Column(
        _LOGPROBS,
        "log π of each token under the sampling policy, at temperature 1; NaN in preferences from "
        "outside.",
    ),
    "finish_reason": _FINISH,
    "score": Column(pa.float64(), "Score by the oracle."),
}

TABLES: Mapping[str, Mapping[str, Column]] = {
    "prompts": {"prompt_id": _ID, "messages": _MESSAGES, "reference_answer": _ANSWER},
    "responses": {
        "prompt_id": _ID,
        "sample_index": _INDEX,
        "messages": _MESSAGES,
        "reference_answer": _ANSWER,
        "prompt_token_ids": _PROMPT_TOKENS,
        "response_token_ids": Column(
            _TOKENS, "Sampled tokens, the end-of-sequence token included where drawn."
        ),
        "response_logprobs": Column(
            _LOGPROBS, "log π of each sampled token at temperature 1, before top-p."
        ),
        "response": Column(pa.string(), "Text of the response."),
        "finish_reason": _FINISH,
        "seed": Column(pa.int64(), "Seed of this response's sampling."),
    },
    "scores": {
        "prompt_id": _ID,
        "sample_index": _INDEX,
        "score": Column(
            pa.float64(),
            "The oracle's score; null where it could not score the response.",
            optional=True,
        ),
        "error": Column(pa.string(), "Reason for a missing score.", optional=True),
        "components": Column(
            pa.map_(pa.string(), pa.float64()),
            "Parts of the score by name, where the oracle tells them.",
            optional=True,
        ),
        "oracle": Column(pa.string(), "Name of the oracle."),
    },
    "pairs": {
        "prompt_id": _ID,
        # These three are a conversational preference, as TRL reads it.
        "prompt": _MESSAGES,
        "chosen": Column(_MESSAGES.kind, "The chosen response, one message of the assistant."),
        "rejected": Column(_MESSAGES.kind, "The rejected response, likewise."),
        "prompt_token_ids": _PROMPT_TOKENS,
        **{
            f"{side}_{name}": Column(column.kind, f"{column.meaning} Of the {side} response.")
            for side in ("chosen", "rejected")
            for name, column in _SIDE.items()
        },
        "tie": Column(pa.bool_(), "Both responses score the same (`pair.ties: keep`)."),
    },
    "figures": {
        "model": _MODEL,
        "figure": _FIGURE,
        "value": Column(pa.float64(), "The figure, over all samples."),
        "low": Column(pa.float64(), "Lower end of its 95 % interval over prompts.", optional=True),
        "high": Column(pa.float64(), "Upper end.", optional=True),
        "n": Column(pa.int64(), "Prompts of the interval.", optional=True),
    },
    "prompt_figures": {
        "model": _MODEL,
        "prompt_id": _ID,
        "figure": _FIGURE,
        "total": Column(pa.float64(), "Sum over the prompt's samples."),
        "count": Column(pa.int64(), "Number that it is divided by."),
    },
}
SCHEMAS: Mapping[str, pa.Schema] = {
    table: pa.schema(
        [pa.field(name, column.kind, nullable=column.optional) for name, column in columns.items()],
        metadata={"table": table},
    )
    for table, columns in TABLES.items()
}
PROMPTS, RESPONSES, SCORES, PAIRS, FIGURES, PROMPT_FIGURES = SCHEMAS.values()


class TableWriter:
    """Writes rows to a Parquet file in groups of ``rows_per_group``, which memory holds."""

    def __init__(self, path: Path, schema: pa.Schema, rows_per_group: int = ROWS_PER_GROUP) -> None:
        self._schema = schema
        self._rows: list[Mapping[str, Any]] = []
        self._rows_per_group = rows_per_group
        self._writer = pq.ParquetWriter(path, schema, compression="zstd")
        self.num_rows = 0

    def write(self, row: Mapping[str, Any]) -> None:
        """Adds one row, a mapping from the schema's names to values."""
        self._rows.append(row)
        self.num_rows += 1
        if len(self._rows) >= self._rows_per_group:
            self.flush()

    def write_batch(self, batch: pa.RecordBatch | pa.Table) -> None:
        """Adds rows in columnar form as one row group, after the rows held so far."""
        self.flush()
        self._writer.write(batch)
        self.num_rows += batch.num_rows

    def flush(self) -> None:
        """Writes the rows held so far as one row group."""
        if self._rows:
            self._writer.write_table(pa.Table.from_pylist(self._rows, schema=self._schema))
            self._rows.clear()

    def __enter__(self) -> TableWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if kind is None:
            self.flush()
        self._writer.close()


def write_table(path: Path, schema: pa.Schema, rows: Iterable[Mapping[str, Any]]) -> int:
    """Writes all ``rows`` to ``path`` and returns how many there were."""
    with TableWriter(path, schema) as writer:
        for row in rows:
            writer.write(row)
    return writer.num_rows


def open_table(path: Path, schema: pa.Schema) -> pq.ParquetFile:
    """Opens a Parquet file; UserError if it is none, or has other columns."""
    file = open_parquet(path)
    if not file.schema_arrow.equals(schema, check_metadata=False):
        table = (schema.metadata or {}).get(b"table", b"?").decode()
        raise UserError(
            f"{path} does not have the columns of the {table!r} table: has "
            f"{', '.join(file.schema_arrow.names)}; wants {', '.join(schema.names)}",
            "pass the artifact of the right stage, made by this version",
        )
    return file


def read_batches(
    paths: Path | Sequence[Path],
    schema: pa.Schema,
    *,
    columns: Sequence[str] | None = None,
    batch_rows: int = ROWS_PER_GROUP,
) -> Iterator[pa.RecordBatch]:
    """Yields record batches of at most ``batch_rows`` rows of one or several tables, in order.

    Raises:
        UserError: A file has other columns, or lacks rows.
    """
    for path in [paths] if isinstance(paths, Path) else paths:
        with open_table(path, schema) as file:
            missing = file.metadata.num_rows
            for batch in file.iter_batches(batch_size=batch_rows, columns=columns):
                missing -= batch.num_rows
                yield batch
            # pyarrow takes some damaged pages for the end of their rows.
            if missing:
                raise UserError(f"{path} lacks {missing} of its rows", "run `geb verify`")


def read_rows(
    paths: Path | Sequence[Path], schema: pa.Schema, *, columns: Sequence[str] | None = None
) -> Iterator[dict[str, Any]]:
    """Yields the rows of one or several tables as dictionaries, in order and streaming."""
    for batch in read_batches(paths, schema, columns=columns):
        yield from batch.to_pylist()


def num_rows(paths: Path | Sequence[Path]) -> int:
    """Rows of one or several Parquet files, from their footers."""
    chosen = [paths] if isinstance(paths, Path) else paths
    return sum(pq.read_metadata(path).num_rows for path in chosen)
