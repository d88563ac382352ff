"""Rows of JSON-lines files, Parquet files and hub data sets, streamed, each with its place."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from stages.contract.context import ResolvedInput
from stages.contract.errors import UserError
from stages.contract.request import HubInput

_BATCH_ROWS = 1024
_CHUNK_BYTES = 1 << 20

Row = tuple[str, dict[str, Any]]
"""Where a row is (``prompts.jsonl, line 3``), and its columns."""


@dataclass(frozen=True)
class Source:
    """Something that yields the same rows each time it is read.

    Attributes:
        name: What it is, for messages.
        num_rows: Rows, or lines where blank ones are not told apart.
        read: Starts reading from the first row.
    """

    name: str
    num_rows: int
    read: Callable[[], Iterator[Row]]


def open_source(
    source: ResolvedInput, *, columns: tuple[str, ...], subset: str | None, split: str
) -> Source:
    """Opens one input of the request: a file, a folder of files (by name), or a hub data set.

    Args:
        source: The input.
        columns: Columns of interest; others are not read where the format allows.
        subset: Configuration name of a hub data set.
        split: Split of a hub data set.

    Raises:
        UserError: There is nothing to read, or it is of a kind that is not known.
    """
    if isinstance(source.source, HubInput):
        return _open_hub(source.source, columns, subset, split)
    assert source.path is not None
    if not source.path.is_dir():
        return _open_file(source.path, columns)
    files = sorted(
        path for path in source.path.iterdir() if path.suffix in _READERS and path.is_file()
    )
    if not files:
        raise UserError(
            f"{source.path} holds no prompt files ({', '.join(_READERS)})",
            "name a file, or a folder that holds such files",
        )
    parts = [_open_file(path, columns) for path in files]
    return Source(
        name=str(source.path),
        num_rows=sum(part.num_rows for part in parts),
        read=lambda: (row for part in parts for row in part.read()),
    )


def _open_file(path: Path, columns: tuple[str, ...]) -> Source:
    reader = _READERS.get(path.suffix)
    if reader is None:
        raise UserError(
            f"{path} is of no known kind: prompts are read from {', '.join(_READERS)} files",
            "convert the file, or rename it to what it is",
        )
    return reader(path, columns)


def _open_jsonl(path: Path, columns: tuple[str, ...]) -> Source:
    del columns

    def read() -> Iterator[Row]:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                place = f"{path}, line {number}"
                try:
                    row = json.loads(line)
                except ValueError as error:
                    raise UserError(
                        f"{place}: not a line of JSON ({error})",
                        "write one JSON object on each line, as UTF-8",
                    ) from error
                if not isinstance(row, dict):
                    raise UserError(
                        f"{place}: a {type(row).__name__}, not an object with columns",
                        'write lines such as {"prompt": "…"} or {"messages": […]}',
                    )
                yield place, row

    return Source(str(path), _count_lines(path), read)


def _count_lines(path: Path) -> int:
    with path.open("rb") as file:
        return sum(chunk.count(b"\n") for chunk in iter(lambda: file.read(_CHUNK_BYTES), b""))


def _open_parquet(path: Path, columns: tuple[str, ...]) -> Source:
    try:
        with pq.ParquetFile(path) as file:
            num_rows = file.metadata.num_rows
            names = file.schema_arrow.names
    except pa.ArrowInvalid as error:
        raise UserError(f"{path} is not a Parquet file: {error}", "check the file") from error
    # A file without any of them is read whole: the message about it then names its columns.
    wanted = [name for name in names if name in columns] or None

    def read() -> Iterator[Row]:
        # Read ahead, the whole file would be in memory by the end.
        with pq.ParquetFile(path, pre_buffer=False, buffer_size=_CHUNK_BYTES) as file:
            batches = file.iter_batches(batch_size=_BATCH_ROWS, columns=wanted)
            yield from _number_rows(str(path), batches)

    return Source(str(path), num_rows, read)


def _open_hub(source: HubInput, columns: tuple[str, ...], subset: str | None, split: str) -> Source:
    # Takes seconds to import: only where a hub data set is asked for.
    import datasets

    name = f"data set {source.repo}, split {split}"
    try:
        data = datasets.load_dataset(source.repo, subset, revision=source.revision, split=split)
    except (datasets.exceptions.DatasetNotFoundError, ValueError) as error:
        raise UserError(
            f"{name} (revision {source.revision}): {error}",
            "check the name, the revision, `split` and `subset`, and that you may read it",
        ) from error
    wanted = [each for each in data.column_names if each in columns]
    chosen = (data.select_columns(wanted) if wanted else data).with_format("arrow")

    def read() -> Iterator[Row]:
        return _number_rows(name, chosen.iter(batch_size=_BATCH_ROWS))

    return Source(name, len(data), read)


def _number_rows(name: str, batches: Iterator[Any]) -> Iterator[Row]:
    number = 0
    for batch in batches:
        for row in batch.to_pylist():
            number += 1
            yield f"{name}, row {number}", row


_READERS: dict[str, Callable[[Path, tuple[str, ...]], Source]] = {
    ".jsonl": _open_jsonl,
    ".parquet": _open_parquet,
}
