"""Parts of a table that a long stage keeps in its work folder, for the attempt after a kill."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from stages.contract.atomic import atomic_path
from stages.contract.digests import set_aside
from stages.contract.errors import UserError
from stages.tables.schemas import read_rows


@dataclass(frozen=True)
class Part:
    """The rows that a stage makes from the items ``first`` to before ``stop`` of its input."""

    folder: Path
    schema: pa.Schema
    first: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.first

    @property
    def path(self) -> Path:
        """File of the rows; parts with other bounds have other files."""
        return self.folder / f"{self.first:09d}-{self.stop:09d}.parquet"

    def read(self, warn: Callable[[str], None]) -> list[dict[str, Any]]:
        """The rows that an attempt has saved; a damaged file is set aside with a warning."""
        if not self.path.exists():
            return []
        try:
            return list(read_rows(self.path, self.schema))
        except (UserError, OSError, pa.ArrowException) as error:
            warn(f"damaged file: {error}. Set aside as {set_aside(self.path).name}.")
            return []

    def save(self, rows: Iterable[dict[str, Any]]) -> None:
        """Replaces the saved rows; a kill leaves the earlier ones, or all of these.

        Pages have checksums, by which :meth:`read` notices damage.
        """
        table = pa.Table.from_pylist(list(rows), schema=self.schema)
        with atomic_path(self.path, durable=True) as scratch:
            pq.write_table(table, scratch, compression="zstd", write_page_checksum=True)


def split_parts(folder: Path, schema: pa.Schema, start: int, stop: int, size: int) -> list[Part]:
    """Parts of at most ``size`` items each, in order."""
    return [
        Part(folder, schema, first, min(first + size, stop)) for first in range(start, stop, size)
    ]
