"""Command ``geb dataset``: a run's responses, scores and pairs for use elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flows.commands.common import RunName, StorePath, console
from flows.execution.run_record import RunRecord
from stages.store.opening import open_store


def dataset(
    name: RunName,
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder; new, or empty.")],
    store: StorePath = "store",
) -> None:
    """Write a run's responses, scores and pairs as a data set for TRL, with a card."""
    # Here: templates and tables take a moment to load.
    from flows.report.dataset import export

    target = folder.expanduser().absolute()
    counts = export(RunRecord.existing(open_store(store), name), target)
    rows = ", ".join(f"{number} {table}" for table, number in counts.items())
    console.print(f"{rows} of {name} are in {target}", markup=False)
    console.print(f"next: datasets.load_dataset({str(target)!r}, 'pairs')", markup=False)


COMMANDS = (dataset,)
