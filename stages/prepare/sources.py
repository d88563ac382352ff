"""Rows of JSON-lines files, Parquet files and hub data sets, streamed, each with its place."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from stages.contract.data_files import (
    DATA_SUFFIXES,
    FILE_SUFFIXES,
    Row,
    column_names,
    count_rows,
    files_of_folder,
    read_data_file,
)
from stages.contract.errors import UserError
from stages.contract.request import HubInput
from stages.harness.context import ResolvedInput
from stages.modeling.hub_data import open_hub_data
from stages.prepare.params import PrepareParams


@dataclass(frozen=True)
class Source:
    """Something that yields the same rows each time it is read.

    Attributes:
        name: What it is, for messages.
        num_rows: Rows, or lines if blank ones are not told apart.
        read: Starts reading from the first row.
        columns: All its columns, for messages, if rows have those of interest only.
    """

    name: str
    num_rows: int
    read: Callable[[], Iterator[Row]]
    columns: tuple[str, ...] = ()


def open_source(source: ResolvedInput, params: PrepareParams, split: str) -> Source:
    """Opens one input of the request: a file, a folder of files (by name), or a hub data set.

    Hidden files of a folder are no part of it, as they are none of its digest.

    Args:
        source: The input.
        params: Columns of interest (others are not read if the format allows), and of a hub data
            set its subset, or the file that is read in place of a subset and split.
        split: Split of a hub data set.
    """
    columns = (
        params.messages_column,
        params.prompt_column,
        params.reference_column,
        params.reference_column.partition(".")[0],
        *params.reference_columns,
    )
    if isinstance(source.source, HubInput):
        if params.hub_file is not None:
            return _open_file(_fetch(source.source, params.hub_file), columns)
        found = open_hub_data(source.source, params.subset, split, columns)
        return Source(found.name, len(found.data), found.read, tuple(found.data.column_names))
    assert source.path is not None
    if not source.path.is_dir():
        return _open_file(source.path, columns)
    files = files_of_folder(source.path)
    if not files:
        raise UserError(
            f"{source.path} holds no prompt files ({', '.join(DATA_SUFFIXES)})",
            "name a file, or a folder that holds such files",
        )
    parts = [_open_file(path, columns) for path in files]
    return Source(
        name=str(source.path),
        num_rows=sum(part.num_rows for part in parts),
        read=lambda: (row for part in parts for row in part.read()),
        columns=tuple(dict.fromkeys(name for part in parts for name in part.columns)),
    )


def _open_file(path: Path, columns: tuple[str, ...]) -> Source:
    if path.suffix not in FILE_SUFFIXES:
        raise UserError(
            f"{path} is of no known kind: prompts are read from {', '.join(FILE_SUFFIXES)} files",
            "convert the file, or rename it to what it is",
        )
    return Source(
        str(path), count_rows(path), lambda: read_data_file(path, columns), column_names(path)
    )


def _fetch(source: HubInput, name: str) -> Path:
    """One file of a hub repository, in the client's cache."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    try:
        return Path(
            hf_hub_download(source.repo, name, revision=source.revision, repo_type=source.repo_type)
        )
    except LocalEntryNotFoundError:
        # The hub could not be asked: a retry may help.
        raise
    except (EntryNotFoundError, ValueError) as error:  # The latter for `..` in a name.
        raise UserError(
            f"data set {source.repo} (revision {source.revision}) has no file {name}",
            "correct `hub_file`",
        ) from error
