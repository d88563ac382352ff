"""Commands ``geb why``, ``geb what-if`` and ``geb doubt``: causes of a result, and its trust."""

import json
from dataclasses import asdict
from typing import Annotated

import typer

from flows.commands.common import (
    AsJson,
    Overrides,
    Registered,
    RunName,
    StorePath,
    answer,
    configured_run,
    prefect_session,
)
from flows.execution.run_record import RunRecord, run_of
from flows.pipeline.loading import check_config, merged, overrides_of
from flows.pipeline.presets import NO_PRESET
from flows.report.files import render
from flows.report.table import FittedTable
from stages.store.opening import open_store
from stages.store.registry import ModelRegistry


def why(name: RunName, store: StorePath = "store", as_json: AsJson = False) -> None:
    """Trace a run's gain or loss to the samples, pairs and steps that taught it; writes a page.

    A model (NAME, NAME@ALIAS, NAME:VERSION) means the run that made it.
    """
    from flows.report.summary import summarise
    from flows.report.why import explain

    opened = open_store(store)
    record = RunRecord.existing(opened, run_of(opened, name)[0])
    found = explain(summarise(record))
    page = record.write("why.html", render("why.html.jinja", why=found))
    lessons = [(each.name, each.first) for each in found.kinds if each.first]
    lines = [
        f"{name}, first in iteration {first.iteration}, step {first.steps[0] + 1}\n"
        f"        {first.chosen.prompt}\n        {first.rejected.text} → {first.chosen.text}"
        for name, first in lessons
    ]
    # An answer has hundreds of kinds; the document lists those that matter.
    document = json.loads(json.dumps(asdict(found), default=sorted)) | {"page": page}
    shown = [found.table()] if found.kinds else []
    answer(as_json, document, found.sentence(), *shown, *lines, f"page  {page}")


def what_if(
    name: RunName, overrides: Overrides = None, store: StorePath = "store", as_json: AsJson = False
) -> None:
    """Tell what other settings would change in a finished run, from its artifacts; runs nothing.

    Shows pairs, ties and the bonus's gradient before and after, and what a run would cost.
    """
    from flows.report.what_if import what_if as compare

    record = RunRecord.existing(open_store(store), name)
    config = configured_run(store, name)
    values = merged(config.to_values(), overrides_of(overrides or ()))
    asked = check_config(values, f"run {name} with --set")
    found = compare(record, config, asked)
    page = record.write("what-if.html", render("what_if.html.jinja", found=found))
    lines = [found.plan_line(), *found.cautions, f"page  {page}"]
    answer(as_json, asdict(found) | {"page": page}, found.title(), found.table(), *lines)


def doubt(
    model: Registered,
    prompts: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Prompts that nothing has seen; else what is left over."),
    ] = None,
    store: StorePath = "store",
    as_json: AsJson = False,
) -> None:
    """Try to refute a registered model's gain: other seed and prompts, bad answers, suites.

    The verdict is kept in the registry: `geb models` shows it, `geb promote --doubted` asks for it.
    """
    opened = open_store(store)
    version = ModelRegistry(opened).find(model)
    config = configured_run(store, version.run)
    with prefect_session(store, f"{config.name}-doubt", as_json):
        from flows.doubt import doubt as doubt_flow

        name = f"{version.name}:{version.version}"
        found = doubt_flow(name, prompts or "", NO_PRESET, config.to_values())
    results = {True: "survived", False: "failed", None: "not tried"}
    rows = [(each.name, results[each.passed], each.finding) for each in found.checks]
    table = FittedTable("", ("check", "result", "finding"), rows, kept=3, left=3)
    title = f"{name} {found.verdict()}"
    text = render("doubt.html.jinja", title=title, found=found, table=table)
    page = RunRecord(opened, f"{config.name}-doubt").write("doubt.html", text)
    document = found.model_dump(mode="json") | {"verdict": found.verdict(), "page": page}
    answer(as_json, document, table, title, f"page  {page}")
