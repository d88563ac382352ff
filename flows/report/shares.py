"""Means and differences over seeds of figures that may be shares.

Student's and Welch's intervals know no bounds, a share does: what an interval has beyond them no
share can be, and leaving it out changes nothing of its coverage.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from flows.report.solved import ACCURACY, LENGTH_CONTROLLED
from flows.report.statistics import Difference, Estimate, over_seeds, welch
from flows.report.table import COLUMNS, SUITE_COLUMNS

_SHARES = {
    *(
        name
        for each in (*COLUMNS, *SUITE_COLUMNS)
        if each.share
        for name in (each.name, each.title)
    ),
    *(ACCURACY, LENGTH_CONTROLLED),
}
_OF_TRIES = ("pass@", "maj@")


def is_share(figure: str) -> bool:
    """True for a figure between 0 and 1, by its name in ``metrics.json`` or by its title."""
    return figure in _SHARES or figure.startswith(_OF_TRIES)


def mean_over_seeds(values: Sequence[float], whole: float | None) -> Estimate:
    """Mean with Student's interval; that of a share ends at 0 and at the whole.

    Args:
        values: The figure in runs with different seeds.
        whole: The largest share in its unit, 1 or 100; None for a figure that is no share.

    Raises:
        ValueError: There are no values.
    """
    found = over_seeds(values)
    return found if whole is None else found.within(0.0, whole)


def difference_over_seeds(
    first: Sequence[float], second: Sequence[float], whole: float | None
) -> Difference:
    """Mean of ``second`` minus mean of ``first``, by Welch; see :func:`mean_over_seeds`."""
    found = welch(first, second)
    if whole is None:
        return found
    return replace(found, estimate=found.estimate.within(-whole, whole))


def whole_of(figure: str) -> float | None:
    """1 for a share, None for any other figure."""
    return 1.0 if is_share(figure) else None
