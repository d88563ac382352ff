"""The ``judge`` oracle: a chat model at an OpenAI-compatible address marks or compares responses.

Judges prefer the answer that they read first (or last) whatever it says: so each comparison is
asked twice with the answers swapped, and what does not survive the swap counts as a tie.

Shapes: ``K`` responses per prompt.
"""

import math
import re
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

from jinja2 import StrictUndefined, Template, TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from pydantic import BaseModel, Field

from stages.contract.digests import sha256_file
from stages.contract.errors import UserError
from stages.harness.context import StageContext
from stages.score.oracle import Oracle, Verdict, prompt_starts
from stages.score.params import ScoreParams
from stages.score.remote import Remote

_TEMPLATES = {
    "scored": Path(__file__).with_name("judge.jinja"),
    "pairwise": Path(__file__).with_name("judge_pairwise.jinja"),
    "coherence": Path(__file__).with_name("judge_coherence.jinja"),
}
_SCORE_LINE = re.compile(r"Score: (-?\d+(?:\.\d+)?)")
# Share of the point that the answer shown as A gets.
_POINTS = {"Verdict: A": 1.0, "Verdict: B": 0.0, "Verdict: tie": 0.5}
_TIE = 0.5
REPEAT_AGREEMENT = "repeat_agreement"
"""Component: share of questions whose answer was the same each time."""
ORDER_AGREEMENT = "order_agreement"
"""Component: share of comparisons whose verdict survived the swap of the two."""
Rows = Sequence[Mapping[str, Any]]


class _Message(BaseModel):
    # Null if a server sets the model's reasoning apart and nothing followed it.
    content: str | None


class _Choice(BaseModel):
    message: _Message


class _Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int


class Reply(BaseModel):
    """The part of a chat completion that is read."""

    choices: list[_Choice] = Field(min_length=1)
    usage: _Usage

    @property
    def last_line(self) -> str:
        """The last line that is not empty, without space around it."""
        text = self.choices[0].message.content or ""
        return text.rstrip().rpartition("\n")[2].strip()


def _token_components(replies: Iterable[Reply]) -> dict[str, float]:
    """The replies' token counts, as components of a score."""
    used = [each.usage for each in replies]
    return {
        "judge_prompt_tokens": float(sum(each.prompt_tokens for each in used)),
        "judge_completion_tokens": float(sum(each.completion_tokens for each in used)),
    }


@dataclass(frozen=True)
class Question:
    """One kind of question, asked at temperature 0.

    Attributes:
        remote: The server.
        template: Renders the only message.
        model: The model's name at the server.
        max_tokens: Longest answer.
    """

    remote: Remote
    template: Template
    model: str
    max_tokens: int

    def ask(
        self, groups: Sequence[Sequence[Mapping[str, Any]]]
    ) -> Generator[tuple[int, list[Reply]], None, None]:
        """Asks once for each set of the template's variables.

        Yields:
            (number of the group, its replies) once all of a group's questions are answered.
        """
        yield from ((number, []) for number, group in enumerate(groups) if not group)
        asked = [
            (number, place) for number, group in enumerate(groups) for place in range(len(group))
        ]
        known: list[dict[int, Reply]] = [{} for _ in groups]
        payloads = (self._payload(groups[number][place]) for number, place in asked)
        with closing(self.remote.post_each(payloads, Reply)) as replies:
            for request, reply in replies:
                number, place = asked[request]
                known[number][place] = reply
                if len(known[number]) == len(groups[number]):
                    yield number, [known[number][each] for each in sorted(known[number])]

    def _payload(self, variables: Mapping[str, Any]) -> dict[str, Any]:
        try:
            text = self.template.render(variables)
        except TemplateError as error:
            raise UserError(
                f"the judge's template does not render: {error}",
                f"it may use {', '.join(variables)}",
            ) from error
        return {
            "model": self.model,
            "messages": [{"role": "user", "content": text}],
            "temperature": 0,
            "max_tokens": self.max_tokens,
        }


@dataclass(frozen=True)
class ScoredJudge:
    """Asks for a mark of each response, or several times for one.

    Attributes:
        question: Asks the server; its template sees ``messages``, ``response``,
            ``reference_answer``, ``lowest`` and ``highest``.
        identity: The model's name, and the digest of the template.
        lowest: The worst mark.
        highest: The best mark.
        passes: Times that each question is asked.
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
        return {
            "messages": row["messages"],
            "response": row["response"],
            "reference_answer": row["reference_answer"],
            "lowest": f"{self.lowest:g}",
            "highest": f"{self.highest:g}",
        }

    def _verdict(self, replies: Sequence[Reply]) -> Verdict:
        components = _token_components(replies)
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


@dataclass(frozen=True)
class _Comparison:
    """Two responses to one prompt.

    Attributes:
        first: Place of a row.
        second: Place of another row of the prompt; None for the first row's opponent.
        texts: The two responses; None if there is nothing to compare with.
    """

    first: int
    second: int | None
    texts: tuple[str, str] | None

    @property
    def is_asked(self) -> bool:
        """True if the judge is asked; the same text twice is a tie unasked."""
        return self.texts is not None and self.texts[0] != self.texts[1]


@dataclass(frozen=True)
class PairwiseJudge:
    """Scores a response by the share of points that it gets in its comparisons, from 0 to 1.

    Each response is compared with the prompt's reference answer, with some other samples of its
    prompt or, if the rows name one, with its opponent.

    Attributes:
        question: Asks the server; its template sees ``messages``, ``first``, ``second`` and
            ``reference_answer``.
        identity: The model's name, and the digest of the template.
        num_opponents: How many of the following samples each one is compared with; None compares
            with the reference answer.
        passes: Times that each order is asked.
    """

    question: Question
    identity: str
    num_opponents: int | None
    passes: int = 1

    def score(self, rows: Rows) -> Iterator[tuple[int, Verdict]]:
        """Scores the rows; see :class:`stages.score.oracle.Oracle`.

        The verdicts on a prompt's responses come together, when the last comparison is decided.
        """
        spans = list(pairwise(prompt_starts(rows)))
        prompts = [self._compare(rows, start, stop) for start, stop in spans]
        groups = [
            [
                self._variables(rows, each, order)
                for each in comparisons
                if each.is_asked
                for order in (0, 1)
                for _ in range(self.passes)
            ]
            for comparisons in prompts
        ]
        with closing(self.question.ask(groups)) as answered:
            for number, replies in answered:
                left = iter(replies)
                decided = [
                    (each, self._result(each, list(islice(left, 2 * self.passes * each.is_asked))))
                    for each in prompts[number]
                ]
                for place in range(*spans[number]):
                    own = [each for each in decided if place in (each[0].first, each[0].second)]
                    yield place, _verdict(place, own)

    def _compare(self, rows: Rows, start: int, stop: int) -> list[_Comparison]:
        """The comparisons that a prompt's rows ask for."""
        other = "reference_answer" if self.num_opponents is None else "opponent"
        if self.num_opponents is None or other in rows[start]:
            return [
                _Comparison(
                    place,
                    None,
                    None if row[other] is None else (row["response"], row[other]),
                )
                for place, row in enumerate(rows[start:stop], start)
            ]
        size = stop - start
        pairs = {
            tuple(sorted((start + place, start + (place + step) % size)))
            for place in range(size)
            for step in range(1, min(self.num_opponents, size - 1) + 1)
        }
        return [
            _Comparison(first, second, (rows[first]["response"], rows[second]["response"]))
            for first, second in sorted(pairs)
        ]

    def _variables(self, rows: Rows, comparison: _Comparison, order: int) -> dict[str, Any]:
        row = rows[comparison.first]
        assert comparison.texts is not None
        first, second = comparison.texts if order == 0 else comparison.texts[::-1]
        # The judge is not told which of the two the reference answer is.
        reference = None if self.num_opponents is None else row["reference_answer"]
        return {
            "messages": row["messages"],
            "first": first,
            "second": second,
            "reference_answer": reference,
        }

    def _result(self, comparison: _Comparison, replies: Sequence[Reply]) -> Verdict:
        """Points of the first response: 1 won, 0 lost, ½ a tie or won in one order only."""
        components = _token_components(replies)
        if comparison.texts is None:
            return Verdict(None, "the prompt has no reference answer to compare with", components)
        if not replies:
            return Verdict(_TIE, None, components)
        unclear = next((each for each in replies if each.last_line not in _POINTS), None)
        if unclear is not None:
            reason = (
                f"the judge's last line is {unclear.last_line[:80]!r}, not 'Verdict: A', "
                "'Verdict: B' or 'Verdict: tie'"
            )
            return Verdict(None, reason, components)
        points = [_POINTS[each.last_line] for each in replies]
        as_a, as_b = points[: self.passes], [1 - each for each in points[self.passes :]]
        if self.passes > 1:
            repeated = sum(len(set(each)) == 1 for each in (as_a, as_b))
            survived = sum(one == other for one, other in zip(as_a, as_b, strict=True))
            components |= {
                REPEAT_AGREEMENT: repeated / 2,
                ORDER_AGREEMENT: survived / self.passes,
            }
        return Verdict(sum(as_a + as_b) / len(replies), None, components)


def _verdict(place: int, own: Sequence[tuple[_Comparison, Verdict]]) -> Verdict:
    """The verdict on a row; the tokens of a comparison are shared by its rows."""
    components = _token_components(())
    for name in components:
        components[name] = sum(
            result.components[name] * (1.0 if each.second is None else 0.5) for each, result in own
        )
    if not own:
        return Verdict(None, "the prompt has no second response to compare with", components)
    error = next((result.error for _, result in own if result.error is not None), None)
    if error is not None:
        return Verdict(None, error, components)
    points = [
        result.score if each.first == place else 1 - result.score
        for each, result in own
        if result.score is not None
    ]
    for name in (REPEAT_AGREEMENT, ORDER_AGREEMENT):
        found = [each.components[name] for _, each in own if name in each.components]
        if found:
            components[name] = sum(found) / len(found)
    return Verdict(sum(points) / len(points), None, {"comparisons": len(points), **components})


def load(ctx: StageContext[ScoreParams]) -> Oracle:
    """Prepares questions to the model that the parameters name."""
    settings = ctx.params.judge
    assert settings.model is not None
    shipped = settings.mode if settings.template == "default" else settings.template
    path = ctx.path("code") if ctx.has("code") else _TEMPLATES[shipped]
    question = Question(
        remote=Remote(settings, "score.judge"),
        template=_read_template(path),
        model=settings.model,
        max_tokens=settings.max_tokens,
    )
    name = "judge" if settings.mode == "scored" else "judge-pairwise"
    identity = f"{name}:{settings.model}@{sha256_file(path)[:16]}"
    if settings.mode == "pairwise":
        num_opponents = None if settings.against == "reference" else settings.opponents
        return PairwiseJudge(question, identity, num_opponents, settings.passes)
    return ScoredJudge(question, identity, settings.lowest, settings.highest, settings.passes)


def _read_template(path: Path) -> Template:
    environment = ImmutableSandboxedEnvironment(undefined=StrictUndefined, trim_blocks=True)
    try:
        return environment.from_string(path.read_text(encoding="utf-8"))
    except (TemplateError, UnicodeDecodeError) as error:
        raise UserError(
            f"the judge's template {path} cannot be read: {error}", "correct the template"
        ) from error
