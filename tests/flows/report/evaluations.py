"""Evaluations written by hand, as far as reports read them."""

import json
from types import SimpleNamespace

from flows.report.table import FigureRow
from stages.evaluate.run import write_figures
from stages.evaluate.statistics import Estimate
from stages.evaluate.summary import SampleSummary
from stages.store.base import Artifact


def artifact_in(folder, *sources):
    """An artifact as far as the report reads it: its files, and what it shows of the manifest."""
    fields = {"key": "0" * 64, "stage": "evaluate", "seconds": 1.0, "software": {}}
    fields["sources"] = lambda: sources
    fields["inputs"] = {"train": sources}
    fields |= {"ended": "2026-01-01T00:00:00+00:00", "host": "here", "accelerator": "cpu"}
    return Artifact(folder, SimpleNamespace(**fields))


def figure_row(iteration, **figures):
    """A row of figures, each a value or a value with its interval."""
    estimates = {}
    for name, figure in figures.items():
        estimates[name] = Estimate(*figure) if isinstance(figure, tuple) else Estimate(figure)
    return FigureRow(iteration, estimates)


def write_evaluation(folder, policy, base, metrics=None, tries=(), components=None):
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
    by_model = {
        model: dict.fromkeys(("mean_log_pi", "mean_log_pi_ref")) for model in ("policy", "base")
    }
    for name, value in (metrics or {}).items():
        model = "base" if name.startswith("base_") else "policy"
        by_model[model][name.removeprefix("base_")] = value
    for values in by_model.values():
        values["mean_log_pi"] = values["mean_log_pi"] or values["mean_log_pi_ref"]
    write_figures(folder, by_model, by_prompt)
    return artifact_in(folder)


def _by_prompt(rewards, tries):
    summary = SampleSummary(1.0 if tries else None, tries)
    for prompt, given in rewards.items():
        summary._add_scores(prompt, list(given))
        scored = [reward for reward in given if reward is not None]
        summary._add_figure("mean_log_pi_ref", prompt, [-10 * reward for reward in scored])
        summary._add_figure("mean_response_tokens", prompt, [5.0] * len(given))
    return summary.by_prompt()


def _won(policy, base):
    won = {}
    for prompt, rewards in policy.items():
        others = base.get(prompt, [None])
        ours = [reward for reward in rewards if reward is not None]
        theirs = [reward for reward in others if reward is not None]
        if (len(ours), len(theirs)) == (len(rewards), len(others)):
            won[prompt] = (float(sum(ours) > sum(theirs)), 1)
    return won
