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
    configuration = summary.config.to_values()
    figures = draw({summary.run: summary.rows})
    page = render(
        "report.html.jinja",
        summary=summary,
        tables=summary.tables(),
        verdict=verdict(summary),
        facts=facts(summary),
        kappa=kappa_label(summary.config.train),
        plots=[svg(figure) for figure in figures.values()],
        samples=_samples(summary, "evaluate"),
        suite_samples={
            f"suite {name}": _samples(summary, suite_prefix("evaluate", name))
            for name in summary.suites
        },
        gates=summary.made("promote"),
        configuration=yaml.safe_dump(configuration, sort_keys=False, allow_unicode=True),
    )
    return record.write("report.html", page)


def _samples(summary: Summary, stage: str) -> list[dict[str, Any]]:
    """Prompts with samples of both models, those first where their mean scores differ most.

    Each row has the policy's mean `score` and its `gain` over the base's, as far as known.
    """
    evaluated = summary.last(stage)
    if evaluated is None:
        return []
    rows = [row for _, row in read_data_file(evaluated.file("samples.jsonl"))]
    for row in rows:
        row["score"] = _mean_score(row["policy"])
        base = _mean_score(row["base"])
        is_known = row["score"] is not None and base is not None
        row["gain"] = row["score"] - base if is_known else None
    return sorted(rows, key=lambda row: -abs(row["gain"] or 0.0))


def _mean_score(responses: Sequence[Mapping[str, Any]]) -> float | None:
    scores = [response["score"] for response in responses if response["score"] is not None]
    return statistics.fmean(scores) if scores else None


def facts(summary: Summary) -> dict[str, str]:
    """Date, duration, machines and versions, as far as the artifacts tell."""
    seconds = {}
    machines = set()
    software = {}
    last = ""
    for artifact in summary.artifacts.values():
        manifest = artifact.manifest
        seconds[manifest.key] = manifest.seconds
        machines.add(f"{manifest.host} ({manifest.accelerator})")
        software.update(manifest.software)
        last = max(last, manifest.ended)
    if not last:
        return {}
    ended = datetime.datetime.fromisoformat(last).astimezone()
    # Sampling may have another torch, in vLLM's environment.
    if trained := summary.last("train"):
        software |= trained.manifest.software
    versions = [f"{name} {software[name]}" for name in _SHOWN_SOFTWARE if name in software]
    total = duration(sum(seconds.values()))
    return {
        "last result": ended.strftime("%Y-%m-%d %H:%M %Z"),
        "computed in": f"{total} of stages, {len(seconds)} of them",
        "on": ", ".join(sorted(machines)),
        "with": ", ".join(versions),
    }
