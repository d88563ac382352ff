"""The HTML report of a run: one file, which loads nothing from a network."""

import datetime
import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

import yaml

from flows.execution.run_record import RunRecord
from flows.pipeline.config import RunConfig
from flows.pipeline.steps import suite_place
from flows.report.files import render
from flows.report.plots import Plot
from flows.report.prompt_figures import components, means
from flows.report.status import duration
from flows.report.summary import Summary
from flows.report.table import ANSWER_COLUMNS
from flows.report.verdict import verdict
from stages.contract.data_files import read_data_file

_SHOWN_SOFTWARE = ("geb", "python", "torch", "transformers", "vllm", "deepspeed")


def write(record: RunRecord, summary: Summary, plots: Sequence[Plot]) -> str:
    """Writes ``report.html`` with a run's figures into its folder and returns its place."""
    values = summary.config.to_values()
    samples = _samples(summary)
    suites = summary.config.model_dump(mode="json", include={"suites"}, exclude_defaults=True)
    page = render(
        "report.html.jinja",
        summary=summary,
        answers=[column.title for column in ANSWER_COLUMNS],
        verdict=verdict(summary),
        facts=facts(summary),
        groups=[(title, list(group)) for title, group in groupby(plots, lambda plot: plot.group)],
        samples=samples,
        components=sorted({name for row in samples for name in row["components"]}),
        suite_samples={suite.name: _samples(summary, suite.name) for suite in summary.suites},
        gates=[(t, made.read_json("decision.json")) for t, made in summary.made("promote")],
        changed=list(_changed(values | suites, RunConfig().to_values())),
        configuration=yaml.safe_dump(values, sort_keys=False, allow_unicode=True),
    )
    return record.write("report.html", page)


def _samples(summary: Summary, suite: str | None = None) -> list[dict[str, Any]]:
    """Prompts with samples of both models, those first where their mean scores differ most.

    Each row has the `gain`, the policy's mean `score`, and its mean `components`, as far as they
    are known.
    """
    steps = [f"iteration-{t}/evaluate" for t in range(summary.config.iterations, 0, -1)]
    if suite is not None:
        steps = [suite_place(step, suite) for step in steps]
    step = next((step for step in steps if step in summary.artifacts), None)
    if step is None:
        return []
    rows = [row for _, row in read_data_file(summary.artifacts[step].file("samples.jsonl"))]
    scores = [
        artifact.file("scores.parquet")
        for name, artifact in summary.artifacts.items()
        if name.startswith(f"{step}/score/")
    ]
    means_by_component = {
        name.removeprefix("components."): means(figure)
        for name, figure in components(scores).items()
    }
    for row in rows:
        policy = _mean_score(row["policy"])
        base = _mean_score(row["base"])
        row["score"] = policy
        row["gain"] = None if policy is None or base is None else policy - base
        row["components"] = {
            name: mean_by_prompt[row["prompt_id"]]
            for name, mean_by_prompt in means_by_component.items()
            if row["prompt_id"] in mean_by_prompt
        }
    return sorted(rows, key=lambda row: -abs(row["gain"] or 0.0))


def _mean_score(responses: Sequence[Mapping[str, Any]]) -> float | None:
    scores = [response["score"] for response in responses if response["score"] is not None]
    return statistics.fmean(scores) if scores else None


def _changed(
    values: Mapping[str, Any], defaults: Mapping[str, Any], at: str = ""
) -> Iterator[tuple[str, str, str]]:
    """Name, value and default of every setting that is not at its default."""
    for name, value in values.items():
        default = defaults.get(name)
        place = f"{at}{name}"
        if value and isinstance(value, dict):
            yield from _changed(value, default or {}, f"{place}.")
        elif value != default:
            yield place, _short(value), _short(default)


def _short(value: Any) -> str:
    return "unset" if value is None else json.dumps(value, ensure_ascii=False)


def facts(summary: Summary) -> list[tuple[str, str]]:
    """Date, duration, machines and versions, as far as the artifacts tell."""
    manifests = [artifact.manifest for artifact in summary.artifacts.values()]
    if not manifests:
        return []
    seconds = {manifest.key: manifest.seconds for manifest in manifests}
    newest = max(manifests, key=lambda made: datetime.datetime.fromisoformat(made.ended))
    ended = datetime.datetime.fromisoformat(newest.ended).astimezone()
    trained = summary.last("train")
    software = (trained.manifest if trained else newest).software
    versions = [f"{name} {software[name]}" for name in _SHOWN_SOFTWARE if name in software]
    machines = dict.fromkeys(f"{made.host} ({made.accelerator})" for made in manifests)
    is_complete = summary.status is None or summary.status.state in ("completed", "running")
    return [
        ("finished" if is_complete else "last result", ended.strftime("%Y-%m-%d %H:%M %Z")),
        ("computed in", f"{duration(sum(seconds.values()))} of stages, {len(seconds)} of them"),
        ("on", ", ".join(machines)),
        ("with", ", ".join(versions)),
        *_correlations(summary),
        *_kept(summary),
    ]


def _kept(summary: Summary) -> Iterator[tuple[str, str]]:
    """Share of each iteration's update that its saved weights hold."""
    summaries = [artifact.read_json("summary.json") for _, artifact in summary.made("train")]
    shares = [f"{values['update_kept']:.2f}" for values in summaries if "update_kept" in values]
    if shares:
        yield "update kept in the saved weights", ", ".join(shares)


def _correlations(summary: Summary) -> Iterator[tuple[str, str]]:
    """Correlations of the rewards that the last iteration's pairs weigh."""
    paired = summary.last("pair")
    if paired is None:
        return
    correlations = paired.read_json("metrics.json").get("reward_correlations")
    if correlations:
        texts = [f"{one} with {other} {value:+.2f}" for one, other, value in correlations]
        yield "correlation of rewards", ", ".join(texts)
