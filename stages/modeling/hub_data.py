"""Data sets of the Hugging Face hub as streams of rows."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

from stages.contract.data_files import BATCH_ROWS, Row, number_rows
from stages.contract.errors import UserError
from stages.contract.request import HubInput


@dataclass(frozen=True)
class HubData:
    """One split of a data set.

    Attributes:
        name: What it is, for messages.
        data: The data set of the library, with all its columns.
        wanted: Columns that are read; all if it has none of them.
    """

    name: str
    data: Any
    wanted: Collection[str]

    def read(self) -> Iterator[Row]:
        """Starts reading from the first row."""
        wanted = [each for each in self.data.column_names if each in self.wanted]
        chosen = (self.data.select_columns(wanted) if wanted else self.data).with_format("arrow")
        return number_rows(self.name, chosen.iter(batch_size=BATCH_ROWS))


def open_hub_data(
    source: HubInput, subset: str | None, split: str, columns: Collection[str] = ()
) -> HubData:
    """Loads one split of a data set.

    Args:
        source: The data set.
        subset: Its configuration, if it has several.
        split: Its split.
        columns: Columns of interest.

    Raises:
        UserError: There is no such data set, or none that may be read.
    """
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
    return HubData(name, data, columns)
