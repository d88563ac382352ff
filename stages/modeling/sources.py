"""Rows of JSON-lines files, Parquet files and hub data sets, streamed, each with its place."""

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from stages.contract.data_files import (
    BATCH_ROWS,
    DATA_SUFFIXES,
    Row,
    column_names,
    count_rows,
    files_of_folder,
    number_rows,
    read_data_file,
)
from stages.contract.errors import UserError
from stages.contract.request import HubInput
from stages.harness.context import FoundInput


@dataclass(frozen=True)
class RowSource:
    """Something that yields the same rows each time it is read."""

    name: str
    num_rows: int
    """Rows, or lines where blank ones count."""
    read: Callable[[], Iterator[Row]]
    """Starts reading from the first row."""
    columns: tuple[str, ...] = ()
    """All its columns, for messages, if rows have only columns of interest."""


def open_source(
    given: FoundInput,
    *,
    subset: str | None = None,
    split: str = "train",
    hub_file: str | None = None,
    columns: tuple[str, ...] = (),
) -> RowSource:
    """Opens one input of the request: a file, a folder of files (by name), or a hub data set.

    Hidden files of a folder are left out, as in its digest.

    Args:
        given: The input.
        subset: Configuration of a hub data set that has several.
        split: Split of a hub data set.
        hub_file: File of a hub repository that is read in place of subset and split.
        columns: Columns of interest; others are not read if the format allows.
    """
    if isinstance(given, HubInput):
        if hub_file is not None:
            return _open_file(_fetch(given, hub_file), columns)
        return _open_hub_data(given, subset, split, columns)
    if not given.is_dir():
        return _open_file(given, columns)
    files = files_of_folder(given)
    if not files:
        raise UserError(
            f"{given} holds no data files ({', '.join(DATA_SUFFIXES)})",
            "name a file, or a folder that holds such files",
        )
    parts = [_open_file(path, columns) for path in files]
    return RowSource(
        name=str(given),
        num_rows=sum(part.num_rows for part in parts),
        read=lambda: (row for part in parts for row in part.read()),
        columns=tuple(dict.fromkeys(name for part in parts for name in part.columns)),
    )


def _open_file(path: Path, columns: tuple[str, ...]) -> RowSource:
    return RowSource(
        str(path), count_rows(path), lambda: read_data_file(path, columns), column_names(path)
    )


def _open_hub_data(
    source: HubInput, subset: str | None, split: str, columns: Collection[str]
) -> RowSource:
    # Takes seconds to import: only if a hub data set is asked for.
    import datasets

    name = f"data set {source.repo}, split {split}"
    try:
        data = datasets.load_dataset(source.repo, subset, revision=source.revision, split=split)
    except (datasets.exceptions.DatasetNotFoundError, ValueError) as error:
        raise UserError(
            f"{name} (revision {source.revision}): {error}",
            "check the name, the revision, `split` and `subset`, and that you may read it",
        ) from error
    present = [name for name in data.column_names if name in columns]
    chosen = (data.select_columns(present) if present else data).with_format("arrow")

    def read() -> Iterator[Row]:
        return number_rows(name, chosen.iter(batch_size=BATCH_ROWS))

    return RowSource(name, len(data), read, tuple(data.column_names))


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
