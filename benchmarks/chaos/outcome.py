"""Outcomes of a campaign's runs: lines of a file, by which it goes on, and the table of them."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

TOO_LATE = " (the run was over)"
"""End of a fault's text where there was nothing left to befall."""
HANGS = "hangs"
"""In place of a fault's text: an attempt did not end, and was killed."""


@dataclass(frozen=True)
class Outcome:
    """End of one run.

    Attributes:
        seed: The campaign's.
        run: Number of the run.
        setting: Its runner, store and server.
        steps: Steps that it had to compute.
        faults: What befell it, each with what it hit.
        attempts: How often it was resumed until it ended well.
        seconds: Time of all that.
        identical: True if all artifacts equal the calm run's.
        orphans: Processes that outlived their orchestrator.
        tracebacks: Tracebacks that its commands showed.
        repeated: Finished steps that an attempt computed again, or whose artifacts it lost.
        skipped: Why the machine has no place for such a run, which has then not begun.
    """

    seed: int
    run: int
    setting: str
    steps: int
    faults: tuple[str, ...]
    attempts: int
    seconds: float
    identical: bool
    orphans: int
    tracebacks: int
    repeated: int = 0
    skipped: str = ""

    @classmethod
    def of_no_run(cls, seed: int, run: int, setting: str, why: str) -> Outcome:
        """Outcome of a run that has no place here."""
        return cls(seed, run, setting, 0, (), 0, 0.0, True, 0, 0, skipped=why)

    @property
    def is_good(self) -> bool:
        """True where nothing is wrong."""
        is_calm = not (self.orphans or self.tracebacks or self.repeated)
        return bool(self.skipped) or (self.identical and is_calm and HANGS not in self.faults)

    @property
    def struck(self) -> list[str]:
        """Names of the faults that did not come too late."""
        return [fault.split(":")[0] for fault in self.faults if not fault.endswith(TOO_LATE)]

    def line(self) -> str:
        """One line for a person."""
        head = f"seed {self.seed} run {self.run} ({self.setting})"
        if self.skipped:
            return f"{head}: SKIPPED, {self.skipped}"
        return (
            f"{head}: {self.steps} steps to do; "
            f"{'; '.join(self.faults)}; {self.attempts} attempts, {self.seconds:.0f} s: "
            f"{'identical' if self.identical else 'DIFFERS'}, {self.repeated} steps repeated, "
            f"{self.orphans} orphans, {self.tracebacks} tracebacks"
        )


def append(path: Path, outcome: Outcome) -> None:
    """Adds a line to a file of outcomes, in place of one that a kill cut short."""
    if path.exists() and not (text := path.read_text(encoding="utf-8")).endswith("\n"):
        path.write_text(text[: text.rfind("\n") + 1], encoding="utf-8")
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(asdict(outcome)) + "\n")


def read(path: Path) -> list[Outcome]:
    """Outcomes of a file, none where there is none; a line that a kill cut short is left out."""
    if not path.exists():
        return []
    outcomes = []
    for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
        if line.endswith("\n"):
            values = json.loads(line)
            outcomes.append(Outcome(**values | {"faults": tuple(values["faults"])}))
    return outcomes


def table(outcomes: Iterable[Outcome]) -> str:
    """Markdown: counts by seed, by kind of run and by fault."""
    known_outcomes = list(outcomes)
    return "\n\n".join(
        [
            _counts("seed", known_outcomes, lambda each: [str(each.seed)]),
            _counts("runner, store", known_outcomes, lambda each: [each.setting]),
            _counts("fault", known_outcomes, lambda each: set(each.struck)),
        ]
    )


def _counts(
    title: str, outcomes: Iterable[Outcome], groups: Callable[[Outcome], Iterable[str]]
) -> str:
    """A table of the outcomes by group; one may be in several."""
    counts: dict[str, Counter[str]] = {}
    for outcome in outcomes:
        for group in groups(outcome):
            counts.setdefault(group, Counter()).update(
                runs=int(not outcome.skipped),
                skipped=int(bool(outcome.skipped)),
                faults=len(outcome.struck),
                attempts=outcome.attempts,
                identical=int(outcome.identical and not outcome.skipped),
                repeated=outcome.repeated,
                orphans=outcome.orphans,
                tracebacks=outcome.tracebacks,
            )
    columns = (
        "runs",
        "skipped",
        "faults",
        "attempts",
        "identical",
        "repeated",
        "orphans",
        "tracebacks",
    )
    rows = [
        f"| {group} | " + " | ".join(str(counts[group][column]) for column in columns) + " |"
        for group in sorted(counts)
    ]
    return "\n".join(
        [f"| {title} | {' | '.join(columns)} |", f"| --- |{' ---: |' * len(columns)}", *rows]
    )
