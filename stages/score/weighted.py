"""The ``weighted`` oracle: a weighted sum of other oracles' scores."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from stages.harness.context import StageContext
from stages.score.oracle import Oracle, OracleVerdict, load_oracle
from stages.score.params import ORACLES, ScoreParams, ServerSettings


@dataclass(frozen=True)
class Part:
    """One oracle of the sum; its name begins the names of its components."""

    name: str
    oracle: Oracle
    weight: float

    def __str__(self) -> str:
        return f"{self.weight:.15g}*{self.oracle.identity}"


@dataclass(frozen=True)
class WeightedOracle:
    """Adds up weight · score of its parts.

    A response that one of them cannot score has no score. Components are each part's own score
    under its name, and its components under ``name.component``. Parts are asked in their order.
    """

    parts: Sequence[Part]

    @property
    def identity(self) -> str:
        """Weights and identities of the parts."""
        return f"weighted:{'+'.join(sorted(map(str, self.parts)))}"

    def score(self, rows: Sequence[Mapping[str, Any]]) -> Iterator[tuple[int, OracleVerdict]]:
        """Scores the rows; see :class:`stages.score.oracle.Oracle`."""
        verdicts: list[dict[str, OracleVerdict]] = [{} for _ in rows]
        for part in self.parts:
            for place, verdict in part.oracle.score(rows):
                verdicts[place][part.name] = verdict
                if len(verdicts[place]) == len(self.parts):
                    yield place, self._total(verdicts[place])

    def _total(self, verdicts: Mapping[str, OracleVerdict]) -> OracleVerdict:
        components: dict[str, float] = {}
        errors = []
        terms = []
        for part in self.parts:
            verdict = verdicts[part.name]
            for name, value in verdict.components.items():
                components[f"{part.name}.{name}"] = value
            if verdict.score is None:
                errors.append(f"{part.name}: {verdict.error}")
            else:
                components[part.name] = verdict.score
                terms.append(part.weight * verdict.score)
        if errors:
            return OracleVerdict(None, "; ".join(errors), components)
        return OracleVerdict(math.fsum(terms), components=components)


def load(ctx: StageContext[ScoreParams]) -> WeightedOracle:
    """Loads the oracles that have a weight."""
    settings = ctx.params.weighted
    # Not in the order of the settings, which is not in the key.
    names = sorted(settings.weights, key=lambda name: (_asks_a_server(ctx, name), name))
    return WeightedOracle(
        [Part(name, load_oracle(_context(ctx, name)), settings.weights[name]) for name in names]
    )


def _context(ctx: StageContext[ScoreParams], name: str) -> StageContext[ScoreParams]:
    """The stage call as the oracle ``name`` sees it: without inputs that another one needs."""
    of_others = {
        needed for other in ctx.params.parts if other != name for needed in ORACLES[other].needs
    }
    inputs = {key: group for key, group in ctx.inputs.items() if key not in of_others}
    return replace(ctx, params=ctx.params.model_copy(update={"oracle": name}), inputs=inputs)


def _asks_a_server(ctx: StageContext[ScoreParams], name: str) -> bool:
    """True if answers cost time and money: they are asked for last, and kept as they come."""
    return isinstance(getattr(ctx.params, ORACLES[name].section, None), ServerSettings)
