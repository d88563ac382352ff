"""Figures that some evaluations have: solved problems with their votes, and length control."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from flows.pipeline.evaluation import Evaluation
from flows.report.statistics import Estimate
from stages.score.params import VOTES

ACCURACY = "accuracy"
LENGTH_CONTROLLED = "LC win rate"
Ballot = tuple[int, tuple[int, ...], int]
"""Votes for the correct answer, for each wrong one, and abstentions."""


@dataclass(frozen=True)
class Solved:
    """Figures of solved problems that are computed of the rewards.

    Attributes:
        from_score: Smallest score of a correct response; None computes none of them.
        at_k: Numbers of samples k of which pass@k is computed.
        majority_at: Numbers of samples k of which maj@k is computed.
    """

    from_score: float | None = None
    at_k: tuple[int, ...] = ()
    majority_at: tuple[int, ...] = ()

    @classmethod
    def of(cls, evaluation: Evaluation) -> Solved:
        """Figures that an evaluation asks for."""
        return cls(evaluation.correct_from, evaluation.pass_at_k, evaluation.maj_at_k)


def solved_names(solved: Solved) -> list[str]:
    """Names of the figures of solved problems that are asked for."""
    if solved.from_score is None:
        return []
    passed, voted = map(pass_name, solved.at_k), map(majority_name, solved.majority_at)
    return [ACCURACY, *passed, *voted]


def pass_name(k: int) -> str:
    """``pass@16``."""
    return f"pass@{k}"


def majority_name(k: int) -> str:
    """``maj@16``."""
    return f"maj@{k}"


def ballots_of(scores: Sequence[Path], from_score: float) -> dict[str, Ballot]:
    """Votes for the correct answer, for each wrong one, and abstentions, prompt by prompt.

    Samples with an equal answer have the same count of votes, so that c samples with m votes each
    stand for c/m answers. Prompts with a response without a score, or without votes, have none.

    Args:
        scores: Scores, shard by shard.
        from_score: Smallest score of a correct response.
    """
    samples: dict[str, list[tuple[float | None, float | None]]] = {}
    for path in scores:
        for row in pq.read_table(path, columns=["prompt_id", "score", "components"]).to_pylist():
            votes = dict(row["components"] or ()).get(VOTES)
            samples.setdefault(row["prompt_id"], []).append((row["score"], votes))
    ballots = {}
    for name, given in samples.items():
        known = [
            (score, votes) for score, votes in given if score is not None and votes is not None
        ]
        if len(known) < len(given):
            continue
        correct = sum(score >= from_score for score, _ in known)
        sizes = Counter(int(votes) for score, votes in known if score < from_score)
        abstained = sizes.pop(0, 0)
        wrong = tuple(size for size in sorted(sizes) for _ in range(sizes[size] // size))
        ballots[name] = correct, wrong, abstained
    return ballots


def length_controlled(metrics: Mapping[str, Any], model: str) -> dict[str, Estimate]:
    """The length-controlled win rate among an evaluation's metrics by its title, if it is there."""
    name = f"{'base_' if model == 'base' else ''}length_controlled_win_rate"
    value = metrics.get(name)
    if value is None:
        return {}
    low, high = metrics.get(f"{name}_interval") or (None, None)
    return {LENGTH_CONTROLLED: Estimate(value, low, high)}
