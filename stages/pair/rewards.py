"""One reward of several components: each normalised by itself, clipped, weighted, and added up.

Rewards that are added first and normalised together let the one with the largest spread decide;
normalised by themselves, each counts by its weight (GDPO, arXiv 2601.05242).

Shapes: `R` responses, `C` components.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import combinations, pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow.compute as pc

from stages.contract.errors import UserError
from stages.pair.params import RESPONSE_TOKENS, SCORE, PairParams
from stages.tables.join import ScoredBatch

Array = npt.NDArray[np.float64]


def _components_of(batch: ScoredBatch, row: int, names: Sequence[str]) -> list[float]:
    """Named components of one response's score.

    Raises:
        UserError: The score lacks one of them.
    """
    known: dict[str, float] = dict(batch.scored["components"][row].as_py() or ())
    for name in names:
        if name not in known:
            raise UserError(
                f"pair.rewards names {name!r}, and the score of prompt "
                f"{batch.responses['prompt_id'][row]} has the components "
                f"{', '.join(known) or 'none'}",
                "name components that the oracle tells for every response",
            )
    return [known[name] for name in names]


@dataclass
class Rewards:
    """The components that ``pair.rewards`` weighs, and their moments over all responses.

    Attributes:
        params: Weights and normalisation.
        moments: Number of responses, then sums and sums of products of the components' distances
            from ``origin``, [C] and [C, C].
    """

    params: PairParams
    count: int = 0
    origin: Array | None = None
    total: Array = field(default_factory=lambda: np.zeros(0))
    products: Array = field(default_factory=lambda: np.zeros(0))

    def observe(self, batch: ScoredBatch) -> None:
        """Takes in a batch; all are, before the first one is totalled."""
        values = self._values(batch)
        values = values[~np.isnan(values).any(axis=1)]
        if not len(values):
            return
        if self.origin is None:
            # Squares of distances from a value keep the digits that a large offset would cost.
            self.origin = values[0]
            self.total = np.zeros(values.shape[1])
            self.products = np.zeros((values.shape[1],) * 2)
        shifted = values - self.origin
        self.count += len(values)
        self.total += shifted.sum(axis=0)
        self.products += shifted.T @ shifted

    def totals(self, batch: ScoredBatch) -> Array:
        """The weighted sum of each response, [R]; NaN for one without a score."""
        values = self._values(batch)
        if self.params.normalise == "batch" and self.count:
            values = _standardised(values, self._mean(), np.sqrt(np.diag(self._covariance())))
        elif self.params.normalise == "prompt":
            for start, end in pairwise(batch.starts):
                own = values[start:end]
                values[start:end] = _standardised(own, own.mean(axis=0), own.std(axis=0))
        if self.params.clip is not None:
            values = values.clip(-self.params.clip, self.params.clip)
        return values @ np.array(list(self.params.rewards.values()))

    def report(self) -> dict[str, Any]:
        """Moments of the components and their correlations, as JSON values."""
        if not self.count:
            return {}
        names = list(self.params.rewards)
        covariance = self._covariance()
        deviations = np.sqrt(np.diag(covariance))
        moments = zip(names, self._mean().tolist(), deviations.tolist(), strict=True)
        return {
            "rewards": {name: {"mean": mean, "std": std} for name, mean, std in moments},
            "reward_correlations": [
                [names[i], names[j], float(covariance[i, j] / (deviations[i] * deviations[j]))]
                for i, j in combinations(range(len(names)), 2)
                if deviations[i] and deviations[j]
            ],
        }

    def _mean(self) -> Array:
        assert self.origin is not None, "asked after the batches"
        return self.origin + self.total / self.count

    def _covariance(self) -> Array:
        mean = self.total / self.count
        covariance = self.products / self.count - np.outer(mean, mean)
        np.fill_diagonal(covariance, np.diag(covariance).clip(min=0.0))
        return covariance

    def _values(self, batch: ScoredBatch) -> Array:
        """The components, [R, C]; NaN in a row without a score."""
        scores = batch.scores.to_numpy(zero_copy_only=False)
        tokens = pc.list_value_length(batch.responses["response_token_ids"]).to_pylist()
        names = list(self.params.rewards)
        asked = [name for name in names if name not in (SCORE, RESPONSE_TOKENS)]
        values = np.full((len(scores), len(names)), np.nan)
        for row in np.flatnonzero(~np.isnan(scores)).tolist():
            found = dict(zip(asked, _components_of(batch, row, asked), strict=True))
            found |= {SCORE: scores[row], RESPONSE_TOKENS: tokens[row]}
            values[row] = [found[name] for name in names]
        return values


def _standardised(values: Array, mean: Array, deviation: Array) -> Array:
    """Distances from the mean in deviations; zero for a component that never varies."""
    varies = deviation > 0
    return np.where(varies, (values - mean) / np.where(varies, deviation, 1.0), values - mean)
