"""Coverage of the paper's cells: the seeds that are computed of those asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flows.pipeline.paper_cells import BANDIT, KAPPA, Row
from flows.report.paper_values import Findings


@dataclass(frozen=True)
class Coverage:
    """Numbers of seeds of one cell: those computed, and those asked for."""

    row: Row
    coefficient: str
    done: int
    asked: int

    def cells(self) -> list[str]:
        """Cells of the table of coverage."""
        row = self.row
        fields = ", ".join(f"{name}={value}" for name, value in row.fields.items())
        return [
            *row.names(),
            ", ".join(filter(None, (row.configuration, fields))),
            self.coefficient,
            f"{self.done} of {self.asked}",
        ]


def coverage(found: Findings) -> list[Coverage]:
    """Numbers of seeds of each cell, for the κ experiment over its grid."""
    rows = []
    for row in found.rows:
        if row.experiment == BANDIT:
            continue
        done = sum(each.run.row == row for each in found.reported)
        asked = len(row.seeds)
        if row.experiment == KAPPA:
            done = sum(each.run.row == row for each in found.tuning)
            asked = len(row.coefficients()) * len(row.tuning_seeds)
        chosen = found.chosen.get(row, {})
        tuned = sum(each.run.row == row for each in found.tuning)
        coefficient = ", ".join(f"{name} = {value}" for name, value in chosen.items())
        if coefficient:
            coefficient += f" (of {tuned} runs)"
        rows.append(Coverage(row, coefficient or "–", done, asked))
    return rows


def headline(found: Findings, covered: Sequence[Coverage]) -> str:
    """A sentence that counts the cells and runs that are computed."""
    whole = sum(each.done >= each.asked for each in covered)
    some = sum(0 < each.done < each.asked for each in covered)
    runs = len({each.run.name for each in (*found.reported, *found.tuning)})
    return (
        f"{whole} of {len(covered)} cells are computed whole, {some} in part; {runs} runs are "
        "finished, those that chose coefficients included."
    )
