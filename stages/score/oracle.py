"""Interface of oracles, and the loader of the one that the parameters name."""

import importlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from stages.harness.context import StageContext
from stages.score.params import ORACLES, ScoreParams


@dataclass(frozen=True)
class OracleVerdict:
    """An oracle's answer to one response: a score or why there is none, and its named parts."""

    score: float | None
    error: str | None = None
    components: Mapping[str, float] = field(default_factory=dict)


class Oracle(Protocol):
    """Scores responses; made by its module's ``load(ctx)``."""

    @property
    def identity(self) -> str:
        """Name and digest or revision: the same text for the same oracle on every machine."""
        ...

    def score(self, rows: Sequence[Mapping[str, Any]]) -> Iterable[tuple[int, OracleVerdict]]:
        """One verdict for each row of the responses table, as they are known.

        Args:
            rows: ``messages``, ``response``, ``reference_answer``, ``prompt_id`` and
                ``sample_index`` of each response, a prompt's together; ``opponent``
                if the stage was given opponents.

        Yields:
            (place in ``rows``, verdict), in any order; what was yielded before an error is
            kept.

        Raises:
            UserError: The oracle itself is wrong (not merely unable to score a response).
        """
        ...


def load_oracle(ctx: StageContext[ScoreParams]) -> Oracle:
    """Loads the oracle that the parameters name; its threads and processes end with this one."""
    module = importlib.import_module(ORACLES[ctx.params.oracle].module)
    return module.load(ctx)
