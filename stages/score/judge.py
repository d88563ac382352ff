"""The ``judge`` oracle: a chat model at an OpenAI-compatible address marks or compares."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import StrictUndefined, Template, TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from stages.contract.digests import sha256_file
from stages.contract.errors import UserError
from stages.harness.context import StageContext
from stages.score.judge_pairwise import PREFERENCE, VERDICT, PairwiseJudge
from stages.score.judge_question import REPEAT_AGREEMENT, Question, Reply, token_components
from stages.score.oracle import Oracle, Verdict
from stages.score.params import ScoreParams
from stages.score.remote import Remote

_TEMPLATES = {
    "scored": Path(__file__).with_name("judge.jinja"),
    "pairwise": Path(__file__).with_name("judge_pairwise.jinja"),
    "coherence": Path(__file__).with_name("judge_coherence.jinja"),
    "alpaca_eval": Path(__file__).with_name("judge_alpaca_eval.jinja"),
}
_SCORE_LINE = re.compile(r"Score: (-?\d+(?:\.\d+)?)")


@dataclass(frozen=True)
class ScoredJudge:
    """Asks for a mark of each response, as often as there are passes.

    The question's template sees ``messages``, ``response``, ``reference_answer``, and the worst and
    the best mark, ``lowest`` and ``highest``.
    """

    question: Question
    identity: str
    lowest: float
    highest: float
    passes: int = 1

    def score(self, rows: Sequence[Mapping[str, Any]]) -> Iterator[tuple[int, Verdict]]:
        """Scores the rows; see :class:`stages.score.oracle.Oracle`."""
        groups = [[self._variables(row)] * self.passes for row in rows]
        with closing(self.question.ask(groups)) as answered:
            for place, replies in answered:
                yield place, self._verdict(replies)

    def _variables(self, row: Mapping[str, Any]) -> dict[str, Any]:
        shown = {name: row[name] for name in ("messages", "response", "reference_answer")}
        return shown | {"lowest": f"{self.lowest:g}", "highest": f"{self.highest:g}"}

    def _verdict(self, replies: Sequence[Reply]) -> Verdict:
        components = token_components(replies)
        found = [self._mark(reply.last_line) for reply in replies]
        reason = next((why for _, why in found if why is not None), None)
        if reason is not None:
            return Verdict(None, reason, components)
        marks = [mark for mark, _ in found if mark is not None]
        if self.passes > 1:
            components[REPEAT_AGREEMENT] = float(len(set(marks)) == 1)
        return Verdict(math.fsum(marks) / len(marks), None, components)

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
    """Prepares questions to the model that the parameters name."""
    settings = ctx.params.judge
    assert settings.model is not None
    is_alpaca = settings.template == "alpaca_eval" and not ctx.has("code")
    shipped = settings.mode if settings.template == "default" else settings.template
    path = ctx.path("code") if ctx.has("code") else _TEMPLATES[shipped]
    question = Question(
        remote=Remote(settings, "score.judge"),
        template=_read_template(path),
        model=settings.model,
        max_tokens=settings.max_tokens,
        options={"logprobs": True, "top_logprobs": 5} if is_alpaca else {},
    )
    name = "judge" if settings.mode == "scored" else "judge-pairwise"
    identity = f"{name}:{settings.model}@{sha256_file(path)[:16]}"
    if settings.mode == "pairwise":
        num_opponents = None if settings.against == "reference" else settings.opponents
        reading = PREFERENCE if is_alpaca else VERDICT
        return PairwiseJudge(question, identity, num_opponents, settings.passes, reading)
    return ScoredJudge(question, identity, settings.lowest, settings.highest, settings.passes)


def _read_template(path: Path) -> Template:
    environment = ImmutableSandboxedEnvironment(undefined=StrictUndefined, trim_blocks=True)
    try:
        return environment.from_string(path.read_text(encoding="utf-8"))
    except (TemplateError, UnicodeDecodeError) as error:
        raise UserError(
            f"the judge's template {path} cannot be read: {error}", "correct the template"
        ) from error
