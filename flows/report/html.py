"""The HTML report of a run: one file, which loads nothing from a network."""

import datetime
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from flows.execution.run_record import RunRecord
from flows.pipeline.steps import suite_prefix
from flows.planning.show import duration
from flows.report.files import render
from flows.report.plots import draw, svg
from flows.report.summary import Summary, kappa_label
from flows.report.verdict import verdict
from stages.contract.data_files import read_data_file

_SHOWN_SOFTWARE = ("geb", "python", "torch", "transformers", "vllm", "deepspeed")


def write(record: RunRecord, summary: Summary) -> str:
    """Writes ``report.html`` with a run's figures into its folder and returns its place."""
    page = render(
        "report.html.jinja",
        summary=summary,
        tables=summary.tables(),
        verdict=verdict(summary),
        facts=facts(summary),
        kappa=kappa_label(summary.config.train),
        plots=[svg(figure) for figure in draw({summary.run: summary.rows}).values()],
        samples=_samples(summary),
        suite_samples={f"suite {name}": _samples(summary, name) for name in summary.suites},
        gates=[(t, gate.read_json("decision.json")) for t, gate in summary.made("promote")],
        configuration=yaml.safe_dump(
            summary.config.to_values(), sort_keys=False, allow_unicode=True
        ),
    )
    return record.write("report.html", page)


def _samples(summary: Summary, suite: str | None = None) -> list[dict[str, Any]]:
    """Prompts with samples of both models, those first where their mean scores differ most.

    Each row has the policy's mean `score` and its `gain` over the base's, as far as known.
    """
    evaluated = summary.last(suite_prefix("evaluate", suite) if suite else "evaluate")
    if evaluated is None:
        return []
    rows = [row for _, row in read_data_file(evaluated.file("samples.jsonl"))]
    for row in rows:
        policy = _mean_score(row["policy"])
        base = _mean_score(row["base"])
        row["score"] = policy
        row["gain"] = None if policy is None or base is None else policy - base
    return sorted(rows, key=lambda row: -abs(row["gain"] or 0.0))


def _mean_score(responses: Sequence[Mapping[str, Any]]) -> float | None:
    scores = [response["score"] for response in responses if response["score"] is not None]
    return statistics.fmean(scores) if scores else None


def facts(summary: Summary) -> list[tuple[str, str]]:
    """Date, duration, machines and versions, as far as the artifacts tell."""
    manifests = [artifact.manifest for artifact in summary.artifacts.values()]
    if not manifests:
        return []
    seconds = {manifest.key: manifest.seconds for manifest in manifests}
    newest = max(manifests, key=lambda manifest: datetime.datetime.fromisoformat(manifest.ended))
    ended = datetime.datetime.fromisoformat(newest.ended).astimezone()
    trained = summary.last("train")
    software = (trained.manifest if trained else newest).software
    versions = [f"{name} {software[name]}" for name in _SHOWN_SOFTWARE if name in software]
    machines = dict.fromkeys(f"{manifest.host} ({manifest.accelerator})" for manifest in manifests)
    is_complete = summary.status is None or summary.status.state in ("completed", "running")
    return [
        ("finished" if is_complete else "last result", ended.strftime("%Y-%m-%d %H:%M %Z")),
        ("computed in", f"{duration(sum(seconds.values()))} of stages, {len(seconds)} of them"),
        ("on", ", ".join(machines)),
        ("with", ", ".join(versions)),
    ]
