"""Figures of an evaluation prompt by prompt, read from the samples that it has kept.

``metrics.json`` holds means over all samples. Intervals and comparisons of runs need each prompt's
part in them, which is computed here from ``distributions.parquet`` and the oracle's scores.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from flows.pipeline.config import Evaluation
from flows.report.statistics import pass_at_k, proportion, ratio_of_sums
from flows.report.table import BASE, POLICY, Estimate, Model
from stages.store.base import Artifact

ACCURACY = "accuracy"
LENGTH_CONTROLLED = "LC win rate"
# Evaluations whose estimates are kept: a long run shows them after each of its iterations.
_KEPT = 1024

PromptFigure = Mapping[str, tuple[float, float]]
"""One figure of each prompt: a sum over its samples, and what that is divided by."""
Figures = dict[str, PromptFigure]


def means(figure: PromptFigure) -> dict[str, float]:
    """Each prompt's own mean."""
    return {prompt: total / count for prompt, (total, count) in figure.items()}


@dataclass(frozen=True)
class Samples:
    """One model's samples in an evaluation; they are in files of artifacts, which do not change.

    Attributes:
        distributions: Rewards, lengths and log-probabilities of both models' samples.
        scores: The model's scores, shard by shard, with the oracle's components.
        correct_from: Smallest score of a correct response; None computes no solved problems.
        tries: Numbers of samples k of which pass@k is computed.
    """

    model: Model
    distributions: Path
    scores: tuple[Path, ...] = ()
    correct_from: float | None = None
    tries: tuple[int, ...] = ()

    @classmethod
    def of(
        cls,
        artifacts: Mapping[str, Artifact],
        evaluation: Evaluation,
        step: str,
        prefix: str,
        model: Model,
    ) -> Samples:
        """A model's samples among the artifacts of a run.

        ``prefix`` begins the names of the steps that sampled and scored the responses; artifacts of
        scores may be missing.
        """
        shards = [artifacts.get(f"{prefix}/score/{n}") for n in range(evaluation.num_shards)]
        # All or none: means over some of the shards would be other figures.
        known = shards if all(shards) else []
        scores = tuple(each.file("scores.parquet") for each in known if each)
        distributions = artifacts[step].file("distributions.parquet")
        return cls(model, distributions, scores, evaluation.correct_from, evaluation.pass_at_k)

    def solved(self) -> list[str]:
        """Names of the figures of solved problems that are asked for."""
        if self.correct_from is None:
            return []
        return [ACCURACY, *(f"pass@{k}" for k in self.tries)]

    def figures(self) -> Figures:
        """Figures prompt by prompt, by their names in ``metrics.json``.

        The oracle's components are ``components.NAME``, figures of solved problems ``accuracy``
        and ``pass@K``. The base has no ``win_rate``.
        """
        own = self._rewards(self.model)
        found: Figures = {
            "mean_reward": {name: (math.fsum(x), len(x)) for name, x in own.items()},
            **self._solved(own),
        }
        if self.model == POLICY:
            # As in the stage: sums are exactly rounded, so that equal rewards in another order tie.
            base = self._rewards(BASE)
            found["win_rate"] = {
                name: (float(math.fsum(x) > math.fsum(base[name])), 1)
                for name, x in own.items()
                if name in base
            }
        samples = self._table(self.model, ["log_pi_ref", "num_tokens"])
        found["mean_log_pi_ref"] = _grouped(samples["prompt_id"], samples["log_pi_ref"])
        found["mean_response_tokens"] = _grouped(samples["prompt_id"], samples["num_tokens"])
        found |= components(self.scores)
        return {name: figure for name, figure in found.items() if figure}

    def _table(self, model: Model, columns: Sequence[str]) -> pa.Table:
        table = pq.read_table(self.distributions, columns=["model", "prompt_id", *columns])
        return table.filter(pc.equal(table["model"], model))

    def _rewards(self, model: Model) -> dict[str, list[float]]:
        """Rewards by prompt; prompts with an unscored response left out, as ``evaluate`` does."""
        prompts: dict[str, list[float | None]] = {}
        for row in self._table(model, ["reward"]).to_pylist():
            prompts.setdefault(row["prompt_id"], []).append(row["reward"])
        known = {name: [x for x in rewards if x is not None] for name, rewards in prompts.items()}
        return {name: x for name, x in known.items() if len(x) == len(prompts[name])}

    def _solved(self, own: Mapping[str, list[float]]) -> Figures:
        least = self.correct_from
        if least is None:
            return {}
        correct = {name: sum(x >= least for x in rewards) for name, rewards in own.items()}
        found: Figures = {ACCURACY: {name: (n, len(own[name])) for name, n in correct.items()}}
        right = np.array(list(correct.values()), dtype=np.int64)
        tried = np.array([len(x) for x in own.values()], dtype=np.int64)
        for k in self.tries:
            passed = pass_at_k(right, tried, k).tolist()
            found[f"pass@{k}"] = {name: (x, 1) for name, x in zip(own, passed, strict=True)}
        return found


@lru_cache(maxsize=_KEPT)
def estimates(samples: Samples) -> Mapping[str, Estimate]:
    """Figures of a model with their 95 % intervals, by the names of :meth:`Samples.figures`.

    Intervals are bootstraps over prompts, and Wilson's for the win rate: a policy that wins every
    prompt has an interval too.
    """
    found = {}
    for name, figure in samples.figures().items():
        columns = np.array([figure[prompt] for prompt in sorted(figure)], dtype=np.float64)
        sums, counts = columns.T
        is_won = name == "win_rate"
        found[name] = (
            proportion(int(sums.sum()), len(sums)) if is_won else ratio_of_sums(sums, counts)
        )
    return found


def length_controlled(metrics: Mapping[str, Any], model: Model) -> dict[str, Estimate]:
    """The length-controlled win rate among an evaluation's metrics by its title, if it is there."""
    name = f"{'base_' if model == 'base' else ''}length_controlled_win_rate"
    value = metrics.get(name)
    if value is None:
        return {}
    return {LENGTH_CONTROLLED: Estimate(value, *(metrics.get(f"{name}_interval") or ()))}


def components(scores: Sequence[Path]) -> Figures:
    """The oracle's components among scores, as figures ``components.NAME``."""
    found: dict[str, dict[str, tuple[float, float]]] = {}
    for path in scores:
        for row in pq.read_table(path, columns=["prompt_id", "components"]).to_pylist():
            prompt = row["prompt_id"]
            for name, value in row["components"] or ():
                if value is not None:
                    figure = found.setdefault(f"components.{name}", {})
                    total, count = figure.get(prompt, (0.0, 0))
                    figure[prompt] = total + value, count + 1
    return dict(sorted(found.items()))


def _grouped(prompts: pa.ChunkedArray, values: pa.ChunkedArray) -> PromptFigure:
    """Sums and counts by prompt, rows without a value left out."""
    known = pa.table({"name": prompts, "value": values}).filter(pc.is_valid(values))
    sums = known.group_by("name").aggregate([("value", "sum"), ("value", "count")])
    return {row["name"]: (float(row["value_sum"]), row["value_count"]) for row in sums.to_pylist()}
