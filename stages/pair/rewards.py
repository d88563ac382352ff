"""One reward of several components: each normalised by itself, clipped, weighted, and added up.

Rewards that are added first and normalised together let the one with the largest spread decide;
normalised by themselves, each counts by its weight (GDPO, arXiv 2601.05242).

Shapes: `R` responses, `C` components.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
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
        batches: Components of the responses that have a score, [R, C] for each batch.
    """

    params: PairParams
    batches: list[Array] = field(default_factory=list)

    def observe(self, batch: ScoredBatch) -> None:
        """Takes in a batch; all are, before the first one is totalled."""
        values = self._values(batch)
        self.batches.append(values[~np.isnan(values).any(axis=1)])

    @cached_property
    def moments(self) -> tuple[Array, Array]:
        """Means and covariances over all batches, [C] and [C, C]."""
        values = np.concatenate(self.batches)
        return values.mean(axis=0), np.cov(values, rowvar=False, ddof=0).reshape(
            2 * values.shape[1:]
        )

    def totals(self, batch: ScoredBatch) -> Array:
        """The weighted sum of each response, [R]; NaN for one without a score."""
        values = self._values(batch)
        if self.params.normalise == "batch" and self._has_scores:
            mean, covariance = self.moments
            values = _standardised(values, mean, np.sqrt(np.diag(covariance)))
        elif self.params.normalise == "prompt":
            for start, end in pairwise(batch.starts):
                own = values[start:end]
                values[start:end] = _standardised(own, own.mean(axis=0), own.std(axis=0))
        if self.params.clip is not None:
            values = values.clip(-self.params.clip, self.params.clip)
        return values @ np.array(list(self.params.rewards.values()))

    def report(self) -> dict[str, Any]:
        """Moments of the components and their correlations, as JSON values."""
        if not self._has_scores:
            return {}
        names = list(self.params.rewards)
        means, covariance = self.moments
        deviations = np.sqrt(np.diag(covariance))
        return {
            "rewards": {
                name: {"mean": float(mean), "std": float(deviation)}
                for name, mean, deviation in zip(names, means, deviations, strict=True)
            },
            "reward_correlations": [
                [names[i], names[j], float(covariance[i, j] / (deviations[i] * deviations[j]))]
                for i, j in combinations(range(len(names)), 2)
                if deviations[i] and deviations[j]
            ],
        }

    @property
    def _has_scores(self) -> bool:
        return any(len(values) for values in self.batches)

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
