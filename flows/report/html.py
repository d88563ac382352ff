"""The HTML report of a run, one file without network, and the verdict that it begins with."""

import datetime
import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, Literal

import yaml

from flows.execution.run_record import RunRecord, resume_command
from flows.pipeline.config import RunConfig
from flows.pipeline.steps import suite_place
from flows.report.files import render
from flows.report.plots import Plot
from flows.report.prompt_figures import components, means
from flows.report.rows import parted
from flows.report.status import duration
from flows.report.summary import Summary, last_iteration
from flows.report.table import ANSWER_COLUMNS, Cell, figure_of, interval_text
from stages.contract.data_files import read_data_file

_SHOWN_SOFTWARE = ("geb", "python", "torch", "transformers", "vllm", "deepspeed")


def write(record: RunRecord, summary: Summary, plots: Sequence[Plot]) -> str:
    """Writes ``report.html`` with a run's figures into its folder and returns its place."""
    values, samples = summary.config.to_values(), _samples(summary)
    suites = summary.config.model_dump(mode="json", include={"suites"}, exclude_defaults=True)
    page = render(
        "report.html.jinja",
        summary=summary,
        answers=[each.title for each in ANSWER_COLUMNS],
        verdict=verdict(summary),
        facts=facts(summary),
        groups=[(title, list(own)) for title, own in groupby(plots, lambda plot: plot.group)],
        samples=samples,
        components=sorted({name for row in samples for name in row["components"]}),
        suite_samples={each.name: _samples(summary, each.name) for each in summary.suites},
        gates=[(t, each.read_json("decision.json")) for t, each in summary.made("promote")],
        changed=list(_changed(values | suites, RunConfig().to_values())),
        configuration=yaml.safe_dump(values, sort_keys=False, allow_unicode=True),
    )
    return record.write("report.html", page)


def _samples(summary: Summary, suite: str | None = None) -> list[dict[str, Any]]:
    """Prompts with samples of both models, those first where their mean scores differ most.

    Each row has the `gain`, the policy's mean `score`, and its mean `components`, as far as they
    are known.
    """

    def place(prefix: str) -> str:
        return prefix if suite is None else suite_place(prefix, suite)

    evaluated = [place(f"iteration-{t}/evaluate") for t in range(summary.config.iterations, 0, -1)]
    step = next((each for each in evaluated if each in summary.artifacts), None)
    if step is None:
        return []
    rows = [row for _, row in read_data_file(summary.artifacts[step].file("samples.jsonl"))]
    scores = [
        artifact.file("scores.parquet")
        for name, artifact in summary.artifacts.items()
        if name.startswith(f"{step}/score/")
    ]
    known = {name.partition(".")[2]: means(each) for name, each in components(scores).items()}
    for row in rows:
        sides = ([each["score"] for each in row[side]] for side in ("policy", "base"))
        own, base = ([score for score in side if score is not None] for side in sides)
        row["gain"] = statistics.fmean(own) - statistics.fmean(base) if own and base else None
        row["score"] = statistics.fmean(own) if own else None
        prompt = row["prompt_id"]
        row["components"] = {name: each[prompt] for name, each in known.items() if prompt in each}
    return sorted(rows, key=lambda row: -abs(row["gain"] or 0.0))


def _changed(
    values: Mapping[str, Any], defaults: Mapping[str, Any], at: str = ""
) -> Iterator[tuple[str, str, str]]:
    """Name, value and default of every setting that is not at its default."""
    for name, value in values.items():
        default, place = defaults.get(name), f"{at}{name}"
        if value and isinstance(value, dict):
            yield from _changed(value, default or {}, f"{place}.")
        elif value != default:
            yield place, _short(value), _short(default)


def _short(value: Any) -> str:
    return "unset" if value is None else json.dumps(value, ensure_ascii=False)


@dataclass(frozen=True)
class Verdict:
    """One sentence on a run.

    Attributes:
        tone: `good` if the last model was promoted; `bad` if the run did not come to its end, an
            artifact is damaged, or a gate held the model back; `open` if no gate has decided yet.
        sentence: What was found, with its interval.
        reasons: What stands in the way: failed steps, damaged artifacts, gates, pairs that tie.
        cautions: How far to trust it: seeds and prompts, and what became worse.
    """

    tone: Literal["good", "bad", "open"]
    sentence: str
    reasons: tuple[str, ...] = ()
    cautions: tuple[str, ...] = ()


def verdict(summary: Summary) -> Verdict:
    """Verdict after the last iteration that has been evaluated.

    A run that failed, was stopped or lacks steps gets no other verdict than this.
    """
    found, status = _of_models(summary), summary.status
    cautions = tuple(_cautions(summary))
    found = replace(found, reasons=(*found.reasons, *_ties(summary)), cautions=cautions)
    resume = resume_command(summary.run, summary.store)
    if status is not None and (status.num_done < status.num_steps or status.state in _ENDS):
        done = f"{status.num_done} of {status.num_steps} steps are done"
        if status.state == "running":
            return replace(
                found, tone="open", sentence=f"The run is at work: {done}. {found.sentence}"
            )
        ended = _ENDS.get(status.state, "is not complete")
        lacking = [
            # The first line of a message, behind the step's name, has the cause.
            f"{own.step} {each.state}: "
            + own.message.strip().partition("\n")[0].rpartition(f" {own.key[:12]}): ")[2]
            for each in status.steps
            if each.state not in ("done", "reused") and (own := each.record)
        ]
        if number := len(status.waiting):
            lacking.append(f"{number} {'step has' if number == 1 else 'steps have'} not begun")
        sentence = f"The run {ended}: {done}. Go on with `{resume}`."
        sentence += f" So far: {found.sentence}"
        reasons = (*lacking, *found.reasons)
        return replace(found, tone="bad", sentence=sentence, reasons=reasons)
    if summary.damaged:
        number = len(summary.damaged)
        damaged = f"{number} {'artifact is' if number == 1 else 'artifacts are'} damaged"
        sentence = f"{damaged}, and figures are missing here. `{resume}` computes them again."
        sentence += f" {found.sentence}"
        reasons = (*summary.damaged, *found.reasons)
        return replace(found, tone="bad", sentence=sentence, reasons=reasons)
    return found


_ENDS = {
    "failed": "failed",
    "stopped": "was stopped",
    "cancelled": "was cancelled",
    "crashed": "was killed",
}
"""End of a sentence on a run in that state."""


def _of_models(summary: Summary) -> Verdict:
    """Sentences of the evaluations and the gates."""
    done = [row for row in summary.rows if row["iteration"] and row.get("win_rate") is not None]
    if not done:
        return Verdict("open", "No iteration has been evaluated yet.")
    row, base = done[-1], summary.rows[0]
    intervals: Mapping[str, Any] = row.get("intervals", {})
    number = f"{row['iteration']} iteration{'s' if row['iteration'] > 1 else ''}"
    share = _percent(row["win_rate"], intervals.get("win_rate"))
    found = f"After {number} the model scores above its base on {share} of the held-out prompts"
    if row.get("tied_prompts"):
        found += f" ({row['tied_prompts']} tie)"
    if row.get("mean_reward") is not None and base.get("mean_reward") is not None:
        interval = interval_text(intervals.get("mean_reward"), ".3f")
        found += (
            f"; its mean reward is {row['mean_reward']:.3f}{f' {interval}' if interval else ''}, "
            f"the base's {base['mean_reward']:.3f}"
        )
    decision = summary.read_json(f"iteration-{row['iteration']}/promote", "decision.json")
    if not decision:
        return Verdict("open", f"{found}.")
    if decision["promoted"]:
        aliases = ", ".join(decision["aliases"])
        promoted = f" and was promoted to {aliases}" if aliases else ""
        return Verdict("good", f"{found}. It passed every gate{promoted}.")
    reasons = tuple(each["reason"] for each in decision["gates"] if not each["passed"])
    return Verdict("bad", f"{found}. It was not promoted.", reasons)


def _ties(summary: Summary) -> Iterator[str]:
    """Iterations of which nearly all pairs tie."""
    for row in summary.rows[1:]:
        found = row.get("pairs") or 0, row.get("ties") or 0
        if warning := summary.config.pair.tie_warning(*found):
            yield f"iteration {row['iteration']}: {warning}"


def _cautions(summary: Summary) -> Iterator[str]:
    """Limits of the verdict on the last model: doubts of trainings, few prompts, lower figures."""
    for iteration, trained in summary.made("train"):
        for sentence in trained.read_json("summary.json").get("cautions", ()):
            yield f"training of iteration {iteration}: {sentence}"
    t = last_iteration(summary) or 0
    metrics = summary.read_json(f"iteration-{t}/evaluate", "metrics.json")
    if not metrics:
        return
    prompts = metrics["compared_prompts"]
    yield f"one training seed, {prompts} held-out prompts; `geb sweep --seeds` tries other seeds"
    base, now = summary.rows[0], summary.rows[t]
    for name in now["components"]:
        yield from _fall(name, f"components.{name}", base, now)
    for suite in summary.suites:
        for name in ("mean_reward", *suite.rows[-1]["solved"]):
            words = f"suite {suite.name}, {name.replace('_', ' ')}"
            yield from _fall(words, name, suite.rows[0], suite.rows[-1])
    for name in summary.second_opinions():
        if apart := parted(summary, name):
            yield (
                f"the reward rises and {name} falls from {apart.against} to {apart.run}: "
                f"{apart.first:.3f} to {apart.second:.3f}, {apart.shown()}"
            )
    if "perplexity" in metrics:
        perplexities = metrics["base_perplexity"], metrics["perplexity"]
        yield "the perplexity of unrelated text went from {:.2f} to {:.2f}".format(*perplexities)
    cut, before = (metrics[f"{model}truncated_share"] for model in ("", "base_"))
    if cut > before:
        shares = _percent(cut, None), _percent(before, None)
        yield "{} of the answers are cut off, of the base's {}".format(*shares)
    moved = [row["mean_log_pi_ref"] for row in (base, now)]
    if None not in moved:
        yield "log π_ref of the answers moved from {:.2f} to {:.2f} nats".format(*moved)


def _fall(words: str, name: str, base: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    old, new = (figure_of(row, name) for row in (base, now))
    if old and new and new.value < old.value:
        shown = Cell.of(new, ".3f")
        yield f"{words} fell from {old.value:.3f} to {shown}"


def facts(summary: Summary) -> list[tuple[str, str]]:
    """Date, duration, machines and versions, as far as the artifacts tell."""
    manifests = [each.manifest for each in summary.artifacts.values()]
    if not manifests:
        return []
    spans = {each.key: each.seconds for each in manifests}
    newest = max(manifests, key=lambda each: datetime.datetime.fromisoformat(each.ended))
    ended = datetime.datetime.fromisoformat(newest.ended).astimezone()
    trained = summary.last("train")
    software = (trained.manifest if trained else newest).software
    known = [f"{name} {software[name]}" for name in _SHOWN_SOFTWARE if name in software]
    machines = dict.fromkeys(f"{each.host} ({each.accelerator})" for each in manifests)
    is_complete = summary.status is None or summary.status.state in ("completed", "running")
    return [
        ("finished" if is_complete else "last result", ended.strftime("%Y-%m-%d %H:%M %Z")),
        ("computed in", f"{duration(sum(spans.values()))} of stages, {len(spans)} of them"),
        ("on", ", ".join(machines)),
        ("with", ", ".join(known)),
        *_correlations(summary),
        *_kept(summary),
    ]


def _kept(summary: Summary) -> Iterator[tuple[str, str]]:
    """Share of each iteration's update that its saved weights hold."""
    trained = [artifact.read_json("summary.json") for _, artifact in summary.made("train")]
    kept = [f"{each['update_kept']:.2f}" for each in trained if "update_kept" in each]
    if kept:
        yield "update kept in the saved weights", ", ".join(kept)


def _correlations(summary: Summary) -> Iterator[tuple[str, str]]:
    """Correlations of the rewards that the last iteration's pairs weigh."""
    paired = summary.last("pair")
    found = paired.read_json("metrics.json").get("reward_correlations") if paired else None
    if found:
        shown = (f"{one} with {other} {value:+.2f}" for one, other, value in found)
        yield "correlation of rewards", ", ".join(shown)


def _percent(value: float, interval: tuple[float, float] | None) -> str:
    shown = f"{100 * value:.1f} %"
    if interval is None:
        return shown
    return f"{shown} (95 % interval {100 * interval[0]:.1f} to {100 * interval[1]:.1f} %)"
