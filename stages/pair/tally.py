"""Tally of the pair stage: counts and means over all prompts."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import pyarrow.compute as pc

from stages.contract.join import ScoredBatch


@dataclass
class Moments:
    """Count, sum and sum of squares of values that come in batches.

    Squares are taken of distances from the first value, so that a large common offset of the scores
    does not cost digits.
    """

    count: int = 0
    total: float = 0.0
    squares: float = 0.0
    origin: float | None = None

    def add(self, values: npt.NDArray[np.float64]) -> None:
        """Adds a batch."""
        if len(values) == 0:
            return
        if self.origin is None:
            self.origin = float(values[0])
        shifted = values - self.origin
        self.count += len(values)
        self.total += float(shifted.sum())
        self.squares += float(np.square(shifted).sum())

    @property
    def mean(self) -> float | None:
        """Mean of the values; None where there are none."""
        if self.origin is None:
            return None
        return self.origin + self.total / self.count

    @property
    def std(self) -> float | None:
        """Standard deviation of the population; None where there are no values."""
        if self.origin is None:
            return None
        variance = self.squares / self.count - (self.total / self.count) ** 2
        return max(variance, 0.0) ** 0.5


@dataclass
class Tally:
    """Counts and means over all prompts."""

    prompts: int = 0
    responses: int = 0
    pairs: int = 0
    ties: int = 0
    null_scores: int = 0
    prompts_with_null_score: int = 0
    truncated: int = 0
    prompts_cut_off: int = 0
    rewards: Moments = field(default_factory=Moments)
    best: Moments = field(default_factory=Moments)
    margins: Moments = field(default_factory=Moments)
    lengths: Moments = field(default_factory=Moments)

    def add(self, batch: ScoredBatch, scores: npt.NDArray[np.float64]) -> None:
        """Counts the responses of a batch of prompts.

        Args:
            batch: The batch.
            scores: Scores of all rows, NaN where there is none.
        """
        self.prompts += batch.num_prompts
        self.responses += batch.responses.num_rows
        self.null_scores += batch.scores.null_count
        self.rewards.add(scores[~np.isnan(scores)])
        lengths = pc.list_value_length(batch.responses["response_token_ids"])
        self.lengths.add(lengths.to_numpy().astype(np.float64))
        truncated = pc.equal(batch.responses["finish_reason"], "length")
        self.truncated += pc.sum(truncated).as_py() or 0

    def report(self) -> dict[str, float | int | None]:
        """Metrics of the stage."""
        return {
            "prompts": self.prompts,
            "responses": self.responses,
            "pairs": self.pairs,
            "ties": self.ties,
            "null_scores": self.null_scores,
            "prompts_with_null_score": self.prompts_with_null_score,
            "mean_reward": self.rewards.mean,
            "std_reward": self.rewards.std,
            "mean_best_reward": self.best.mean,
            "mean_margin": self.margins.mean,
            "mean_response_tokens": self.lengths.mean,
            "truncated_share": self.truncated / self.responses,
        }
