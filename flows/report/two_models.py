"""Comparison of two models on one evaluation: its figures, and the table that a person reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flows.pipeline.config import RunConfig
from flows.report.prompt_figures import estimates, places
from flows.report.solved import Solved, length_controlled, solved_names
from flows.report.statistics import Estimate
from flows.report.table import Cell, FittedTable, formatted, interval_text
from stages.contract.store import Artifact

# Metrics that are shown for both models; `metrics.json` has the rest.
_SHOWN = (
    # The base is what the policy wins against; it has neither of the first two.
    ("win rate", "win_rate", ".3f"),
    ("tied prompts", "tied_prompts", "d"),
    ("mean reward", "mean_reward", ".3f"),
    ("distinct-1", "distinct_1", ".3f"),
    ("distinct-4", "distinct_4", ".3f"),
    ("log π_ref", "mean_log_pi_ref", ".2f"),
    ("tokens of a response", "mean_response_tokens", ".1f"),
    ("share cut off", "truncated_share", ".3f"),
)


@dataclass(frozen=True)
class Models:
    """The two models and the prompts, as a person names them.

    Attributes:
        policy: A registered model (``name``, ``name@alias``, ``name:version``), a checkpoint
            folder, or a hub id.
        base: The same, for the model that it is compared with; None for the one that the
            configuration starts from.
        prompts: File or hub data set of prompts; None for those that the configuration holds out,
            or the suite's.
        suite: Suite of the configuration whose prompts, sampling and oracle are used; None for the
            evaluation on held-out prompts.
    """

    policy: str
    base: str | None = None
    prompts: str | None = None
    suite: str | None = None


@dataclass
class ModelComparison:
    """Result of an evaluation."""

    models: Models
    artifact: str
    """Address of the artifact with its metrics."""
    metrics: dict[str, Any] = field(default_factory=dict)
    estimates: dict[str, Mapping[str, Estimate]] = field(default_factory=dict)
    """Figures with their intervals, by `policy` and `base`."""
    solved: tuple[str, ...] = ()
    """Names of those among them that only some evaluations have."""
    responses: tuple[Path, ...] = ()
    """The policy's responses, shard by shard."""
    scores: tuple[Path, ...] = ()
    """Their scores."""

    def to_json(self) -> dict[str, Any]:
        """Values for a JSON document."""
        return {
            **vars(self.models),
            "artifact": self.artifact,
            "metrics": self.metrics,
            "estimates": {
                model: {name: vars(each) for name, each in found.items()}
                for model, found in self.estimates.items()
            },
        }

    def rows(self) -> list[dict[str, str]]:
        """A row per figure, for a person: the policy's and the base's."""
        base = self.models.base or "the configuration's policy"
        rows = [{"": "model", "policy": self.models.policy, "base": base}]
        rows += [self._row(title, name, form) for title, name, form in _SHOWN]
        return rows + [self._row(name, name, ".3f") for name in self.solved]

    def _row(self, title: str, name: str, form: str) -> dict[str, str]:
        row = {"": title}
        for model, prefix in (("policy", ""), ("base", "base_")):
            estimate = self.estimates.get(model, {}).get(name)
            value = self.metrics.get(f"{prefix}{name}", estimate.value if estimate else None)
            interval = interval_text(estimate.interval if estimate else None, form)
            row[model] = str(Cell(formatted(value, form), interval))
        return row

    def table(self) -> FittedTable:
        """The table that an evaluation ends with."""
        rows = self.rows()
        return FittedTable("", list(rows[0]), [list(row.values()) for row in rows], kept=3, left=3)


def read_comparison(
    config: RunConfig, models: Models, artifacts: Mapping[str, Artifact]
) -> ModelComparison:
    """Result of a finished evaluation.

    Args:
        config: The configuration of the evaluation.
        models: The two models.
        artifacts: Artifacts of its steps by their names.
    """
    asked = config.evaluation
    solved = Solved.of(asked)
    files = places(artifacts, "evaluate", "policy", "base", asked.num_shards)
    metrics = artifacts["evaluate"].read_json("metrics.json")
    controlled = {model: length_controlled(metrics, model) for model in ("policy", "base")}
    return ModelComparison(
        models,
        artifacts["evaluate"].address(),
        metrics,
        {model: {**estimates(files, model, solved), **each} for model, each in controlled.items()},
        tuple(dict.fromkeys([*solved_names(solved), *controlled["policy"]])),
        tuple(
            artifacts[f"policy/generate/{shard}"].file("responses.parquet")
            for shard in range(asked.num_shards)
        ),
        files.scores,
    )
