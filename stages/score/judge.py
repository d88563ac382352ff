"""The ``judge`` oracle: a chat model at an OpenAI-compatible address marks or compares.

Judges prefer the answer that they read first (or last) whatever it says: so each comparison is
made twice with the answers swapped, and what does not survive the swap counts as a tie.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
from jinja2 import Template, TemplateError
from pydantic import BaseModel, Field

from stages.contract.digests import sha256_file
from stages.contract.errors import UserError
from stages.harness.context import StageContext
from stages.score.oracle import Oracle, OracleVerdict
from stages.score.params import JudgeSettings, ScoreParams
from stages.score.remote import RefusedRequestError, Remote, RequestRows
from stages.score.template import read_template
from stages.tables.join import prompt_starts

_SCORE_LINE = re.compile(r"Score: (-?\d+(?:\.\d+)?)")
# Share of the point that the answer shown as A gets.
_POINTS = {"Verdict: A": 1.0, "Verdict: B": 0.0, "Verdict: tie": 0.5}
_TIE = 0.5
# Following samples that each sample is compared with, the first following the last.
_OPPONENTS = 2
_SHOWN_CHARACTERS = 80
_SHORT_QUESTION = "Say OK."
JudgedRow = Mapping[str, Any]


class UnscoredError(Exception):
    """Reason why rows have no score."""


class _Message(BaseModel):
    # Null if a server sets the model's reasoning apart and nothing followed it.
    content: str | None


class _Choice(BaseModel):
    message: _Message


class Reply(BaseModel):
    """The part of a chat completion that is read."""

    choices: list[_Choice] = Field(min_length=1)

    @property
    def last_line(self) -> str:
        """The last line that is not empty, without space around it; cut for messages."""
        text = self.choices[0].message.content or ""
        return text.rstrip().rpartition("\n")[2].strip()[:_SHOWN_CHARACTERS]


@dataclass(frozen=True)
class Judge:
    """Sends one kind of question to a model of a server, at temperature 0.

    Attributes:
        template: Renders the message.
    """

    remote: Remote
    template: Template
    settings: JudgeSettings
    identity: str

    def score(self, rows: RequestRows) -> Iterator[tuple[int, OracleVerdict]]:
        """Scores the rows; see :class:`stages.score.oracle.Oracle`."""
        compares_samples = (
            self.settings.mode == "pairwise"
            and self.settings.against == "samples"
            and "opponent" not in rows[0]
        )
        starts: Sequence[int] = range(len(rows) + 1)
        if compares_samples:
            starts = prompt_starts(pa.array([row["prompt_id"] for row in rows]))
        return self.remote.score(rows, starts, self._verdicts)

    def _verdicts(self, rows: RequestRows) -> list[OracleVerdict]:
        try:
            return [OracleVerdict(score) for score in self._scores(rows)]
        except UnscoredError as error:
            return [OracleVerdict(None, str(error)) for _ in rows]

    def _scores(self, rows: RequestRows) -> list[float]:
        """Scores of one row, or of a prompt's rows that are compared with each other."""
        row = rows[0]
        if self.settings.mode == "scored":
            return [self._mark(row)]
        if self.settings.against == "reference":
            return [self._points(row, row["reference_answer"])]
        if "opponent" in row:
            return [self._points(row, row["opponent"])]
        return self._shares(rows)

    def _mark(self, row: JudgedRow) -> float:
        """The judge's mark of a response."""
        lowest, highest = self.settings.marks
        shown = {name: row[name] for name in ("messages", "response", "reference_answer")}
        line = self._ask({**shown, "lowest": f"{lowest:g}", "highest": f"{highest:g}"})
        match = _SCORE_LINE.fullmatch(line)
        if match is None:
            raise UnscoredError(f"the judge's last line is {line!r}, not 'Score: <number>'")
        mark = float(match[1])
        if not lowest <= mark <= highest:
            raise UnscoredError(
                f"the judge's mark {mark:g} is not between {lowest:g} and {highest:g}"
            )
        return mark

    def _shares(self, rows: RequestRows) -> list[float]:
        """Share of the points that each response to a prompt wins against the others."""
        size = len(rows)
        if size == 1:
            raise UnscoredError("the prompt has no second response to compare with")
        pairs = {
            tuple(sorted((place, (place + step) % size)))
            for place in range(size)
            for step in range(1, min(_OPPONENTS, size - 1) + 1)
        }
        points: list[list[float]] = [[] for _ in rows]
        for first, second in sorted(pairs):
            won = self._points(rows[first], rows[second]["response"])
            points[first].append(won)
            points[second].append(1 - won)
        return [sum(point) / len(point) for point in points]

    def _points(self, row: JudgedRow, other: str | None) -> float:
        """Points of a response: 1 won, 0 lost, ½ a tie or won in one order only."""
        if other is None:
            raise UnscoredError("the prompt has no reference answer to compare with")
        response = row["response"]
        if response == other:
            return _TIE
        return (
            self._first_wins(row, response, other) + 1 - self._first_wins(row, other, response)
        ) / 2

    def _first_wins(self, row: JudgedRow, first: str, second: str) -> float:
        """Share of the point that the judge gives to the answer shown first."""
        # The judge does not learn which of the two the reference answer is.
        is_hidden = self.settings.against == "reference"
        line = self._ask(
            {
                "messages": row["messages"],
                "first": first,
                "second": second,
                "reference_answer": None if is_hidden else row["reference_answer"],
            }
        )
        share = _POINTS.get(line)
        if share is None:
            forms = ", ".join(map(repr, _POINTS))
            raise UnscoredError(f"the judge's last line is {line!r}, not {forms}")
        return share

    def _ask(self, variables: Mapping[str, Any]) -> str:
        """The last line of the reply to the template's message with these variables."""
        try:
            question = self.template.render(variables)
        except TemplateError as error:
            raise UserError(
                f"the judge's template does not render: {error}",
                f"it may use {', '.join(variables)}",
            ) from error
        try:
            return self._reply(question).last_line
        except RefusedRequestError as error:
            # A wrong setting makes it refuse a short question too, and the stage ends.
            self._reply(_SHORT_QUESTION)
            raise UnscoredError(error.message) from error

    def _reply(self, question: str) -> Reply:
        fields = {
            "temperature": 0,
            "max_tokens": self.settings.max_tokens,
            **self.settings.extra_body,
            "model": self.settings.model,
            "messages": [{"role": "user", "content": question}],
        }
        payload = {name: value for name, value in fields.items() if value is not None}
        return self.remote.post(payload, Reply)


def load(ctx: StageContext[ScoreParams]) -> Oracle:
    """Prepares questions to the model that the parameters name."""
    settings = ctx.params.judge
    name = "judge" if settings.mode == "scored" else "judge-pairwise"
    path = ctx.path("code") if ctx.has("code") else Path(__file__).with_name(f"{name}.jinja")
    identity = f"{name}:{settings.model}@{sha256_file(path)[:16]}"
    if settings.mode == "scored":
        identity += ":{:g}-{:g}".format(*settings.marks)
    return Judge(
        remote=Remote(settings, "score.judge"),
        template=read_template(path, settings.mode),
        settings=settings,
        identity=identity,
    )
