"""A flow that settles its overlap, and does nothing else."""

from __future__ import annotations

from typing import Any

from prefect import flow
from prefect.states import State

from flows.execution.cancellation import ends_cancelled
from flows.execution.overlap import Overlap, settle_overlap


@flow(name="overlapping", persist_result=False)
@ends_cancelled
def overlapping(overlap: Overlap = "go_on") -> str | State[Any]:
    """Settles its overlap."""
    settle_overlap(overlap)
    return "went on"
