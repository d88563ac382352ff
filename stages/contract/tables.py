"""Arrow schemas of everything that crosses a stage border, and streaming readers and writers.

Rows of ``responses`` and ``scores`` come grouped by prompt and in the same order, so that a join is
a walk over both and memory does not grow with the number of prompts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from stages.contract.errors import UserError
from stages.contract.sealed import sealed_path

ROWS_PER_GROUP = 4096
_BUFFER_BYTES = 1 << 20

_MESSAGES = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))
_TOKENS = pa.list_(pa.int32())
_LOGPROBS = pa.list_(pa.float32())

PROMPTS = pa.schema(
    [
        pa.field("prompt_id", pa.string(), nullable=False),
        pa.field("messages", _MESSAGES, nullable=False),
        pa.field("reference_answer", pa.string()),
    ],
    metadata={"table": "prompts"},
)

RESPONSES = pa.schema(
    [
        pa.field("prompt_id", pa.string(), nullable=False),
        pa.field("sample_index", pa.int32(), nullable=False),
        pa.field("messages", _MESSAGES, nullable=False),
        pa.field("reference_answer", pa.string()),
        pa.field("prompt_token_ids", _TOKENS, nullable=False),
        # As sampled, the end-of-sequence token included where one was drawn.
        pa.field("response_token_ids", _TOKENS, nullable=False),
        # log π of each sampled token at temperature 1, before top-p.
        pa.field("response_logprobs", _LOGPROBS, nullable=False),
        pa.field("response", pa.string(), nullable=False),
        pa.field("finish_reason", pa.string(), nullable=False),
        pa.field("seed", pa.int64(), nullable=False),
    ],
    metadata={"table": "responses"},
)

SCORES = pa.schema(
    [
        pa.field("prompt_id", pa.string(), nullable=False),
        pa.field("sample_index", pa.int32(), nullable=False),
        # Null where the oracle could not score the response; `error` then says why.
        pa.field("score", pa.float64()),
        pa.field("error", pa.string()),
        pa.field("components", pa.map_(pa.string(), pa.float64())),
        pa.field("oracle", pa.string(), nullable=False),
    ],
    metadata={"table": "scores"},
)

PAIRS = pa.schema(
    [
        pa.field("prompt_id", pa.string(), nullable=False),
        pa.field("messages", _MESSAGES, nullable=False),
        pa.field("prompt_token_ids", _TOKENS, nullable=False),
        *(
            pa.field(f"{side}_{name}", kind, nullable=False)
            for side in ("chosen", "rejected")
            for name, kind in (
                ("sample_index", pa.int32()),
                ("token_ids", _TOKENS),
                ("logprobs", _LOGPROBS),
                ("response", pa.string()),
                ("finish_reason", pa.string()),
                ("score", pa.float64()),
            )
        ),
        # Both responses score the same; kept only where the pair stage is told to keep ties.
        pa.field("tie", pa.bool_(), nullable=False),
    ],
    metadata={"table": "pairs"},
)

DISTRIBUTIONS = pa.schema(
    [
        # "policy" or "base".
        pa.field("model", pa.string(), nullable=False),
        pa.field("prompt_id", pa.string(), nullable=False),
        pa.field("sample_index", pa.int32(), nullable=False),
        pa.field("reward", pa.float64()),
        # Summed over the response's tokens, at temperature 1: the sampler's and the reference's.
        pa.field("log_pi", pa.float64(), nullable=False),
        pa.field("log_pi_ref", pa.float64()),
        pa.field("num_tokens", pa.int32(), nullable=False),
    ],
    metadata={"table": "distributions"},
)

SCHEMAS: Mapping[str, pa.Schema] = {
    "prompts": PROMPTS,
    "responses": RESPONSES,
    "scores": SCORES,
    "pairs": PAIRS,
    "distributions": DISTRIBUTIONS,
}


class TableWriter:
    """Writes rows to a Parquet file in groups of bounded size.

    Args:
        path: File to create.
        schema: One of the schemas above.
        rows_per_group: Rows held in memory before they are written.
    """

    def __init__(self, path: Path, schema: pa.Schema, rows_per_group: int = ROWS_PER_GROUP) -> None:
        self._schema = schema
        self._rows: list[dict[str, Any]] = []
        self._rows_per_group = rows_per_group
        self._writer = pq.ParquetWriter(path, schema, compression="zstd")
        self.num_rows = 0

    def write(self, row: Mapping[str, Any]) -> None:
        """Adds one row, a mapping from the schema's names to values."""
        self._rows.append(dict(row))
        self.num_rows += 1
        if len(self._rows) >= self._rows_per_group:
            self.flush()

    def write_batch(self, batch: pa.RecordBatch | pa.Table) -> None:
        """Adds rows in columnar form as one row group, after the rows held so far."""
        self.flush()
        table = pa.table({name: batch[name] for name in self._schema.names}, schema=self._schema)
        self._writer.write_table(table)
        self.num_rows += table.num_rows

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


def publish_table(path: Path, schema: pa.Schema, rows: Iterable[Mapping[str, Any]]) -> None:
    """Writes all ``rows`` to ``path`` in one move, with the file's digest beside it.

    For what a stage keeps in its work folder (:func:`stages.contract.sealed.find_whole` says
    whether it is there); artifacts as a whole are the store's to publish.
    """
    with sealed_path(path) as scratch:
        write_table(scratch, schema, rows)


def open_table(path: Path, schema: pa.Schema) -> pq.ParquetFile:
    """Opens a Parquet file and checks that it has the declared columns.

    Raises:
        UserError: The file is missing, is no Parquet file, or has other columns.
    """
    try:
        # Read ahead, the whole file would be in memory by the end.
        file = pq.ParquetFile(path, pre_buffer=False, buffer_size=_BUFFER_BYTES)
    except FileNotFoundError as error:
        raise UserError(f"no such table: {path}", "check the path") from error
    except pa.ArrowInvalid as error:
        raise UserError(f"{path} is not a Parquet file: {error}", "pass a Parquet table") from error
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
    """Yields record batches of at most ``batch_rows`` rows of one or several tables, in order."""
    for path in [paths] if isinstance(paths, Path) else paths:
        with open_table(path, schema) as file:
            yield from file.iter_batches(batch_size=batch_rows, columns=columns)


def read_rows(
    paths: Path | Sequence[Path],
    schema: pa.Schema,
    *,
    columns: Sequence[str] | None = None,
    batch_rows: int = ROWS_PER_GROUP,
) -> Iterator[dict[str, Any]]:
    """Yields the rows of one or several tables as dictionaries, in order and streaming."""
    for batch in read_batches(paths, schema, columns=columns, batch_rows=batch_rows):
        yield from batch.to_pylist()


def num_rows(paths: Path | Sequence[Path]) -> int:
    """Rows of one or several Parquet files, from their footers."""
    chosen = [paths] if isinstance(paths, Path) else paths
    return sum(pq.read_metadata(path).num_rows for path in chosen)
