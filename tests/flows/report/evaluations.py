"""Evaluations written by hand, as far as reports read them."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from flows.report.table import FigureRow
from stages.contract.manifest import Manifest
from stages.evaluate.run import write_figures
from stages.evaluate.statistics import Estimate
from stages.evaluate.summary import PromptFigure, SampleSummary
from stages.store.base import Artifact

Rewards = Mapping[str, Sequence[float | None]]


def artifact_in(folder: Path) -> Artifact:
    """An artifact as far as the report reads it: its files, and no manifest."""
    return Artifact(folder, cast(Manifest, None))


def figure_row(iteration: int, **figures: float | tuple[float, float, float]) -> FigureRow:
    """A row of figures, each a value or a value with its interval."""
    estimates: dict[str, Estimate] = {}
    for name, figure in figures.items():
        estimates[name] = Estimate(*figure) if isinstance(figure, tuple) else Estimate(figure)
    return FigureRow(iteration, estimates)


def write_evaluation(
    folder: Path,
    policy: Rewards,
    base: Rewards,
    metrics: Mapping[str, Any] | None = None,
    tries: Sequence[int] = (),
    components: Mapping[str, Mapping[str, Any]] | None = None,
) -> Artifact:
    """Writes the samples of an evaluation; log π_ref is −10 · reward, a response has 5 tokens.

    With ``tries``, a reward of 1 is correct. ``components`` has figures by prompt, by the model.
    """
    folder.mkdir(parents=True)
    (folder / "metrics.json").write_text(json.dumps(dict(metrics or {})))
    by_prompt = {
        "policy": _by_prompt(policy, tries) | {"win_rate": _won(policy, base)},
        "base": _by_prompt(base, tries),
    }
    for model, figures in (components or {}).items():
        by_prompt[model] |= figures
    by_model: dict[str, dict[str, Any]] = {"policy": {}, "base": {}}
    for name, value in (metrics or {}).items():
        model = "base" if name.startswith("base_") else "policy"
        by_model[model][name.removeprefix("base_")] = value
    write_figures(folder, by_model, by_prompt)
    return artifact_in(folder)


def _by_prompt(rewards: Rewards, tries: Sequence[int]) -> dict[str, PromptFigure]:
    summary = SampleSummary(1.0 if tries else None, tries)
    for prompt, given in rewards.items():
        summary._add_scores(prompt, list(given))
        scored = [reward for reward in given if reward is not None]
        summary._put("mean_log_pi_ref", prompt, [-10 * reward for reward in scored])
        summary._put("mean_response_tokens", prompt, [5.0] * len(given))
    return summary.by_prompt()


def _won(policy: Rewards, base: Rewards) -> PromptFigure:
    won: PromptFigure = {}
    for prompt, rewards in policy.items():
        others = base.get(prompt, [None])
        ours = [reward for reward in rewards if reward is not None]
        theirs = [reward for reward in others if reward is not None]
        if (len(ours), len(theirs)) == (len(rewards), len(others)):
            won[prompt] = (float(sum(ours) > sum(theirs)), 1)
    return won
