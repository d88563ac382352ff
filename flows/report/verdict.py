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
        tone: `good` where the last model was promoted, `bad` where a gate held it back, `open`
            where no gate has decided yet.
        sentence: What was found, with its interval.
        reasons: What the gates say that held it back.
    """

    tone: Literal["good", "bad", "open"]
    sentence: str
    reasons: tuple[str, ...] = ()


def verdict(summary: Summary) -> Verdict:
    """Verdict after the last iteration that has been evaluated."""
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
    return [
        ("finished", ended.astimezone().strftime("%Y-%m-%d %H:%M %Z")),
        ("computed in", f"{duration(sum(spans.values()))} of stages, {len(spans)} of them"),
        ("on", ", ".join(machines)),
        ("with", ", ".join(known)),
    ]


def _percent(value: float, interval: tuple[float, float] | None) -> str:
    shown = f"{100 * value:.1f} %"
    if interval is None:
        return shown
    return f"{shown} (95 % interval {100 * interval[0]:.1f} to {100 * interval[1]:.1f} %)"
