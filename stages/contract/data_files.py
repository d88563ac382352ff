"""Streamed rows of a person's JSON-lines and Parquet files, each with its position for messages."""

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from stages.contract.digests import files_of
from stages.contract.errors import UserError

DATA_SUFFIXES = (".jsonl", ".parquet")
"""Suffixes in a folder, where JSON seldom holds its rows."""
BATCH_ROWS = 1024
_BUFFER_BYTES = 1 << 20

Row = tuple[str, dict[str, Any]]
"""Place of a row (``prompts.jsonl, line 3``), and its columns."""


def read_data_file(path: Path, columns: Sequence[str] = ()) -> Iterator[Row]:
    """Yields the rows of a file in order.

    Where the format allows it, only ``columns`` are read, or all if the file has none of them.

    Raises:
        UserError: The file is not what its name says, or of no kind that is read, or a line or item
            is no JSON object.
    """
    if path.suffix == ".json":
        return _read_json(path)
    if path.suffix == ".jsonl":
        return _read_jsonl(path)
    if path.suffix == ".parquet":
        return _read_parquet(path, columns)
    raise UserError(
        f"{path} is of no known kind: rows are read from .jsonl, .json and .parquet files",
        "convert the file, or rename it to what it is",
    )


def count_rows(path: Path) -> int:
    """Rows of a data file; UserError if a Parquet file is none."""
    if path.suffix == ".parquet":
        with open_parquet(path) as file:
            return int(file.metadata.num_rows)
    if path.suffix == ".json":
        return sum(1 for _ in _read_json(path))
    with path.open("rb") as lines:
        return sum(bool(line.strip()) for line in lines)


def files_of_folder(folder: Path) -> list[Path]:
    """Data files of a folder by name, without hidden ones, which its digest leaves out."""
    files = files_of(folder)
    return [path for path in files if path.parent == folder and path.suffix in DATA_SUFFIXES]


def column_names(path: Path) -> tuple[str, ...]:
    """Columns of a Parquet file; none of another file, whose rows may have different columns.

    Raises:
        UserError: A Parquet file is none.
    """
    if path.suffix != ".parquet":
        return ()
    with open_parquet(path) as file:
        return tuple(file.schema_arrow.names)


def number_rows(name: str, batches: Iterable[pa.RecordBatch | pa.Table]) -> Iterator[Row]:
    """Yields the rows of Arrow batches with their positions."""
    number = 0
    for batch in batches:
        for row in batch.to_pylist():
            number += 1
            yield f"{name}, row {number}", row


def _read_json(path: Path) -> Iterator[Row]:
    """Rows of one JSON array, as a whole."""
    try:
        items = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is no JSON: {error}", "repair the file") from error
    if not isinstance(items, list):
        raise UserError(f"{path} holds no JSON array of rows", "write one, or JSON lines")
    for number, item in enumerate(items, 1):
        yield _columns(f"{path}, item {number}", item)


def _read_jsonl(path: Path) -> Iterator[Row]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            position = f"{path}, line {number}"
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise UserError(
                    f"{position}: not a line of JSON ({error})",
                    "write one JSON object on each line, as UTF-8",
                ) from error
            yield _columns(position, row)


def _columns(position: str, row: Any) -> Row:
    if not isinstance(row, dict):
        raise UserError(
            f"{position}: a {type(row).__name__}, not an object with columns",
            'write rows such as {"prompt": "…"} or {"messages": […]}',
        )
    return position, row


def _read_parquet(path: Path, columns: Sequence[str]) -> Iterator[Row]:
    with open_parquet(path) as file, _explained(path):
        present = [name for name in file.schema_arrow.names if name in columns] or None
        yield from number_rows(str(path), file.iter_batches(BATCH_ROWS, columns=present))


def open_parquet(path: Path) -> pq.ParquetFile:
    """Opens a Parquet file; UserError if it is none."""
    with _explained(path):
        # Read ahead, the whole file would be in memory by the end.
        return pq.ParquetFile(
            path, pre_buffer=False, buffer_size=_BUFFER_BYTES, page_checksum_verification=True
        )


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Turns what pyarrow raises for a damaged file into an error that names the file."""
    try:
        yield
    except (OSError, ValueError, NotImplementedError) as error:
        # The disk's error has a number, a damaged page has none.
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise UserError(
            f"{path} is not a Parquet file, or a damaged one: {error}",
            "write it again, or convert it to JSON lines",
        ) from error
