"""Commands ``geb why`` and ``geb what-if``: causes of a run's result, and of another's."""

from __future__ import annotations

from dataclasses import asdict

from flows.commands.common import AsJson, RunName, StorePath, answer
from flows.execution.run_record import RunRecord, run_of
from stages.contract.atomic import write_atomically
from stages.store.opening import open_store


def why(name: RunName, store: StorePath = "store", as_json: AsJson = False) -> None:
    """Trace a run's gain or loss to the samples, pairs and steps that taught it; writes a page.

    A model (NAME, NAME@ALIAS, NAME:VERSION) means the run that made it.
    """
    # Imported here, since scipy takes a second to load, and the other commands do without it.
    from flows.report.summary import summarise
    from flows.report.why import explain

    opened = open_store(store)
    record = RunRecord.existing(opened, run_of(opened, name)[0])
    found = explain(summarise(record))
    path = record.path / "why.html"
    write_atomically(path, found.page())
    page = record.store.share(path)
    lines = [
        f"{each.gain:+.3f}  {each.prompt}\n        {each.base[0]} → {each.policy[0]}"
        + (f"\n        {each.kind}" if each.kind else "")
        for each in found.traces
    ]
    document = asdict(found) | {"page": page}
    shown = [found.table()] if found.kinds else []
    answer(as_json, document, found.sentence(), *shown, *lines, f"page  {page}")


COMMANDS = (why,)
