"""The ``http`` oracle: a server that takes responses and gives scores (docs/oracles.md)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, model_validator

from stages.contract.errors import UserError
from stages.harness.context import StageContext
from stages.score.oracle import OracleVerdict
from stages.score.params import ScoreParams
from stages.score.remote import Remote, RequestRows

_SENT = ("prompt_id", "sample_index", "messages", "response", "reference_answer")

Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]


class ScoredItem(BaseModel):
    """The server's answer to one response: a score, or none and the reason."""

    model_config = ConfigDict(extra="forbid")

    score: Number | None
    error: str | None = None
    components: dict[str, Number] = {}

    @model_validator(mode="after")
    def _one_of_both(self) -> ScoredItem:
        if (self.score is None) != bool(self.error):
            raise ValueError("an item has either a score or an error")
        return self


class ServerAnswer(BaseModel):
    """The server's answer to one request."""

    model_config = ConfigDict(extra="forbid")

    oracle: str
    scores: list[ScoredItem]


@dataclass(frozen=True)
class HttpOracle:
    """Sends responses to a server in batches."""

    remote: Remote
    server_identity: str
    """The name and version that the server must give as its own."""
    rows_per_request: int

    @property
    def identity(self) -> str:
        """Name and version of the server."""
        return f"http:{self.server_identity}"

    def score(self, rows: RequestRows) -> Iterator[tuple[int, OracleVerdict]]:
        """Scores the rows; see :class:`stages.score.oracle.Oracle`."""
        starts = [*range(0, len(rows), self.rows_per_request), len(rows)]
        return self.remote.score(rows, starts, self._verdicts)

    def _verdicts(self, rows: RequestRows) -> list[OracleVerdict]:
        responses = [{name: row[name] for name in _SENT} for row in rows]
        answer = self.remote.post({"responses": responses}, ServerAnswer)
        if answer.oracle != self.server_identity:
            raise UserError(
                f"the server at {self.remote.url} calls itself {answer.oracle!r}, expected "
                f"is {self.server_identity!r}",
                "set score.http.identity to the oracle that shall score; it is part of the "
                "artifact's key, the address is not",
            )
        if len(answer.scores) != len(rows):
            raise self.remote.disagreement(f"{len(answer.scores)} scores for {len(rows)} responses")
        return [OracleVerdict(item.score, item.error, item.components) for item in answer.scores]


def load(ctx: StageContext[ScoreParams]) -> HttpOracle:
    """Prepares requests to the server that the parameters name."""
    settings = ctx.params.http
    assert settings.identity is not None
    return HttpOracle(Remote(settings, "score.http"), settings.identity, settings.rows_per_request)
