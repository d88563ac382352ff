"""The verdict of a run in a sentence, and the facts around it: dates, duration, versions."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from flows.report.status import duration
from flows.report.summary import Summary
from flows.report.table import interval_text

_SHOWN_SOFTWARE = ("geb", "python", "torch", "transformers", "vllm", "deepspeed")


@dataclass(frozen=True)
class Verdict:
    """One sentence on a run.

    Attributes:
        tone: `good` if the last model was promoted; `bad` if the run did not come to its end, an
            artifact is damaged, or a gate held the model back; `open` if no gate has decided yet.
        sentence: What was found, with its interval.
        reasons: What stands in the way: failed steps, damaged artifacts, gates.
    """

    tone: Literal["good", "bad", "open"]
    sentence: str
    reasons: tuple[str, ...] = ()


def verdict(summary: Summary) -> Verdict:
    """Verdict after the last iteration that has been evaluated.

    A run that failed, was stopped or lacks steps gets no other verdict than this.
    """
    found, status = _of_models(summary), summary.status
    if status is not None and (status.num_done < status.num_steps or status.state in _ENDS):
        done = f"{status.num_done} of {status.num_steps} steps are done"
        if status.state == "running":
            return Verdict("open", f"The run is at work: {done}. {found.sentence}", found.reasons)
        ended = _ENDS.get(status.state, "is not complete")
        lacking = [
            f"{each.record.step} {each.state}: {first_line(each.record.message)}"
            for each in status.steps
            if each.state not in ("done", "reused")
        ]
        lacking += [f"{len(status.waiting)} steps have not begun"] if status.waiting else []
        sentence = f"The run {ended}: {done}. Go on with `{summary.resume_command()}`."
        return Verdict("bad", f"{sentence} So far: {found.sentence}", (*lacking, *found.reasons))
    if summary.damaged:
        sentence = (
            f"{_number(len(summary.damaged), 'artifact')} damaged, and figures are missing here. "
            f"`{summary.resume_command()}` computes them again. {found.sentence}"
        )
        return Verdict("bad", sentence, (*summary.damaged, *found.reasons))
    return found


_ENDS = {
    "failed": "failed",
    "stopped": "was stopped",
    "cancelled": "was cancelled",
    "crashed": "was killed",
}
"""End of a sentence on a run in that state."""


def first_line(text: str) -> str:
    """The first line of a message, which has the cause; the remedy follows it."""
    return text.strip().partition("\n")[0]


def _number(count: int, noun: str) -> str:
    return f"{count} {noun} is" if count == 1 else f"{count} {noun}s are"


def _of_models(summary: Summary) -> Verdict:
    """What the evaluations and the gates say."""
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


def facts(summary: Summary) -> list[tuple[str, str]]:
    """Date, duration, machines and versions, as far as the artifacts tell."""
    manifests = [each.manifest for each in summary.artifacts.values()]
    if not manifests:
        return []
    spans = {each.key: each.seconds for each in manifests}
    ended = max(datetime.datetime.fromisoformat(each.ended) for each in manifests)
    newest = max(manifests, key=lambda each: each.ended)
    trained = summary.last("train")
    software = (trained.manifest if trained else newest).software
    known = [f"{name} {software[name]}" for name in _SHOWN_SOFTWARE if name in software]
    machines = dict.fromkeys(f"{each.host} ({each.accelerator})" for each in manifests)
    is_complete = summary.status is None or summary.status.state in ("completed", "running")
    return [
        (
            "finished" if is_complete else "last result",
            ended.astimezone().strftime("%Y-%m-%d %H:%M %Z"),
        ),
        ("computed in", f"{duration(sum(spans.values()))} of stages, {len(spans)} of them"),
        ("on", ", ".join(machines)),
        ("with", ", ".join(known)),
    ]


def _percent(value: float, interval: tuple[float, float] | None) -> str:
    shown = f"{100 * value:.1f} %"
    if interval is None:
        return shown
    return f"{shown} (95 % interval {100 * interval[0]:.1f} to {100 * interval[1]:.1f} %)"
