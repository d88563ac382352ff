"""A run after its last iteration: its figures, and log π_ref of the responses it trained on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pyarrow.parquet as pq

from flows.report.summary import Summary
from flows.report.table import Figures

HELD_OUT = "held-out prompts"
"""Name of the evaluation that every run has, beside those of its suites."""


@dataclass(frozen=True)
class Finding:
    """One figure of one run after its last iteration.

    Attributes:
        evaluation: ``held-out prompts``, or the name of a suite.
        run: Name of the run.
        method: Label of its method.
        seed: Its seed.
        iteration: The iteration.
        figure: Title of the figure.
        value: Its value.
        low: Lower end of the 95 % interval over prompts; None where there is none.
        high: Upper end.
    """

    evaluation: str
    run: str
    method: str
    seed: int
    iteration: int
    figure: str
    value: float
    low: float | None
    high: float | None


def last_iteration(run: Summary) -> int | None:
    """The last iteration that has an evaluation on held-out prompts."""
    done = [row["iteration"] for row in run.rows[1:] if row["mean_reward"] is not None]
    return done[-1] if done else None


def training_log_pi_ref(run: Summary) -> list[float]:
    """Log π_ref of the responses that the last iteration trained on, chosen and rejected.

    π_ref is what that training measured against (``train.reference``).
    """
    trained = run.last("train")
    if trained is None:
        return []
    table = pq.read_table(trained.file("reference_logprobs.parquet"))
    sums = []
    for side in ("chosen_logprobs", "rejected_logprobs"):
        sums += [sum(each) for each in table[side].to_pylist()]
    return sums


def findings_of(run: Summary, method: str) -> Iterator[Finding]:
    """Figures of a run on held-out prompts and in its suites.

    Args:
        run: The run.
        method: Label of its method.
    """
    tables: list[tuple[str, Figures]] = [(HELD_OUT, run)]
    tables += [(each.name, each) for each in run.suites]
    for evaluation, table in tables:
        iteration = last_iteration(run) if evaluation == HELD_OUT else None
        row = table.rows[iteration if iteration is not None else -1]
        values = {
            each.title: (row.get(each.name), each.name)
            for each in table.columns
            if each.stage == "evaluate"
        }
        values |= {name: (row["solved"].get(name), name) for name in table.solved()}
        values |= {
            name: (row["components"].get(name), f"components.{name}") for name in table.components()
        }
        for title, (value, name) in values.items():
            if value is not None:
                low, high = row["intervals"].get(name, (None, None))
                place = evaluation, run.run, method, run.config.seed, row["iteration"]
                yield Finding(*place, title, value, low, high)
