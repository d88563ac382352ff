"""The ``judge`` oracle: a chat model at an OpenAI-compatible address marks or compares."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import StrictUndefined, Template, TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from stages.contract.context import StageContext
from stages.contract.digests import sha256_file
from stages.contract.errors import UserError
from stages.remote.client import Remote
from stages.score.completion import Question, Reply, Tokens
from stages.score.oracle import Oracle, Verdict
from stages.score.pairwise import PairwiseJudge
from stages.score.params import ScoreParams

_TEMPLATES = {
    "scored": Path(__file__).with_name("judge.jinja"),
    "pairwise": Path(__file__).with_name("judge_pairwise.jinja"),
}
_SCORE_LINE = re.compile(r"Score: (-?\d+(?:\.\d+)?)")


@dataclass(frozen=True)
class ScoredJudge:
    """Asks for one mark per response.

    Attributes:
        question: Asks the server; its template sees ``messages``, ``response``,
            ``reference_answer``, ``lowest`` and ``highest``.
        identity: The model's name, and the digest of the template.
        lowest: The worst mark.
        highest: The best mark.
    """

    question: Question
    identity: str
    lowest: float
    highest: float

    def score(self, rows: Sequence[Mapping[str, Any]]) -> Iterator[tuple[int, Verdict]]:
        """Scores the rows; see :class:`stages.score.oracle.Oracle`."""
        with closing(self.question.ask(self._variables(row) for row in rows)) as replies:
            for place, reply in replies:
                yield place, self._verdict(reply)

    def _variables(self, row: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "messages": row["messages"],
            "response": row["response"],
            "reference_answer": row["reference_answer"],
            "lowest": f"{self.lowest:g}",
            "highest": f"{self.highest:g}",
        }

    def _verdict(self, reply: Reply) -> Verdict:
        score, reason = self._mark(reply.last_line)
        return Verdict(score, reason, Tokens().plus(reply).components())

    def _mark(self, last: str) -> tuple[float | None, str | None]:
        """The number on the last line, or why there is none."""
        match = _SCORE_LINE.fullmatch(last)
        if match is None:
            return None, f"the judge's last line is {last[:80]!r}, not 'Score: <number>'"
        mark = float(match[1])
        if not self.lowest <= mark <= self.highest:
            return None, (
                f"the judge's mark {mark:g} is not between {self.lowest:g} and {self.highest:g}"
            )
        return mark, None


def load(ctx: StageContext[ScoreParams]) -> Oracle:
    """Prepares questions to the model that the parameters name.

    Raises:
        UserError: The key is not in the environment, or the template (input ``code``, if given) is
            none.
    """
    settings = ctx.params.judge
    assert settings.url is not None
    assert settings.model is not None
    path = ctx.path("code") if ctx.has("code") else _TEMPLATES[settings.mode]
    check = "check score.judge.url, score.judge.model and what the server serves there"
    question = Question(
        remote=Remote(settings, url=settings.url, section="score.judge", check=check),
        template=_read_template(path),
        model=settings.model,
        max_tokens=settings.max_tokens,
    )
    name = "judge" if settings.mode == "scored" else "judge-pairwise"
    identity = f"{name}:{settings.model}@{sha256_file(path)[:16]}"
    if settings.mode == "pairwise":
        return PairwiseJudge(question, identity, settings.opponents)
    return ScoredJudge(question, identity, settings.lowest, settings.highest)


def _read_template(path: Path) -> Template:
    environment = ImmutableSandboxedEnvironment(undefined=StrictUndefined, trim_blocks=True)
    try:
        return environment.from_string(path.read_text())
    except TemplateError as error:
        raise UserError(
            f"the judge's template {path} cannot be read: {error}", "correct the template"
        ) from error
