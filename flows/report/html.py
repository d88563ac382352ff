"""The HTML report of a run: one file, no network, every figure traceable to its artifact."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import yaml

from flows.execution.run_record import RunRecord
from flows.pipeline.config import RunConfig
from flows.report.figures import Plot
from flows.report.pages import render
from flows.report.spending import spending
from flows.report.summary import Summary
from flows.report.verdict import facts, verdict
from stages.contract.atomic import write_atomically
from stages.contract.data_files import read_data_file
from stages.contract.store import Artifact

_GROUPS = (
    ("results", "Results by iteration"),
    ("learning", "Learning"),
    ("samples", "Samples of the last iteration, in numbers"),
    ("speed", "Speed"),
)


def write(record: RunRecord, summary: Summary, plots: Sequence[Plot]) -> str:
    """Writes ``report.html`` into the run's folder and returns its place.

    Args:
        record: The run.
        summary: Its results.
        plots: Its figures, see :func:`flows.report.figures.draw`.
    """
    values = json.loads(summary.config.to_json())
    page = render(
        "report.html.jinja",
        summary=summary,
        verdict=verdict(summary),
        facts=facts(summary),
        groups=[
            (title, [each for each in plots if each.group == group])
            for group, title in _GROUPS
            if any(each.group == group for each in plots)
        ],
        samples=_samples(summary.last("evaluate")),
        gates=[(t, each.read_json("decision.json")) for t, each in summary.made("promote")],
        spending=spending(record, summary),
        changed=list(_changed(values, json.loads(RunConfig().to_json()))),
        configuration=yaml.safe_dump(values, sort_keys=False, allow_unicode=True),
    )
    path = record.path / "report.html"
    write_atomically(path, page)
    return record.store.share(path)


def _samples(artifact: Artifact | None) -> list[dict[str, Any]]:
    """Prompts with samples of both models, those first where their mean scores differ most."""
    if artifact is None:
        return []
    rows = [row for _, row in read_data_file(artifact.file("samples.jsonl"))]
    for row in rows:
        means = [_mean(row[side]) for side in ("policy", "base")]
        row["gain"] = None if None in means else means[0] - means[1]
    return sorted(rows, key=lambda row: -abs(row["gain"] or 0.0))


def _mean(samples: Sequence[Mapping[str, Any]]) -> Any:
    scores = [each["score"] for each in samples if each["score"] is not None]
    return statistics.fmean(scores) if scores else None


def _changed(
    values: Mapping[str, Any], defaults: Mapping[str, Any], at: str = ""
) -> Iterator[tuple[str, str, str]]:
    """Name, value and default of every setting that is not at its default."""
    for name, value in values.items():
        default, place = defaults.get(name), f"{at}{name}"
        if isinstance(value, dict) and isinstance(default, dict) and default:
            yield from _changed(value, default, f"{place}.")
        elif value != default:
            yield place, _short(value), _short(default)


def _short(value: Any) -> str:
    return "unset" if value is None else json.dumps(value, ensure_ascii=False)
