"""The ``judge`` oracle: a chat model at an OpenAI-compatible address marks or compares.

Judges prefer the answer that they read first (or last) whatever it says: so each comparison is
asked twice with the answers swapped, and what does not survive the swap counts as a tie.
"""

import math
import re
from collections import Counter
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from jinja2 import StrictUndefined, Template, TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from pydantic import BaseModel, Field

from stages.contract.digests import sha256_file
from stages.contract.errors import UserError
from stages.harness.context import StageContext
from stages.score.oracle import Oracle, Verdict, prompt_starts
from stages.score.params import JudgeSettings, ScoreParams
from stages.score.remote import Remote

_TEMPLATES = {
    "scored": Path(__file__).with_name("judge.jinja"),
    "pairwise": Path(__file__).with_name("judge_pairwise.jinja"),
    "coherence": Path(__file__).with_name("judge_coherence.jinja"),
    "alpaca_eval": Path(__file__).with_name("judge_alpaca_eval.jinja"),
}
_SCORE_LINE = re.compile(r"Score: (-?\d+(?:\.\d+)?)")
# Share of the point that the answer shown as A gets.
_POINTS = {"Verdict: A": 1.0, "Verdict: B": 0.0, "Verdict: tie": 0.5}
_TIE = 0.5
# AlpacaEval's names of the answer shown first and of the other.
_FIRST = "m"
_SECOND = "M"
_SHOWN_CHARACTERS = 80
Rows = Sequence[Mapping[str, Any]]


class _Message(BaseModel):
    # Null if a server sets the model's reasoning apart and nothing followed it.
    content: str | None


class _Token(BaseModel):
    token: str
    logprob: float


class _Position(BaseModel):
    top_logprobs: list[_Token]


class _Logprobs(BaseModel):
    content: list[_Position] | None = None


class _Choice(BaseModel):
    message: _Message
    logprobs: _Logprobs | None = None


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

    @property
    def preferred(self) -> float | None:
        """AlpacaEval's preference for the answer shown first: p(m) / (p(m) + p(M)).

        Its parser ``logprob_parser`` reads the same tokens. If the server returns no
        log-probabilities, its text answer is used. None if neither token is there.
        """
        logprobs = self.choices[0].logprobs
        if not logprobs or not logprobs.content:
            return {_FIRST: 1.0, _SECOND: 0.0}.get(self.last_line)
        shares = {each.token: math.exp(each.logprob) for each in logprobs.content[0].top_logprobs}
        first = shares.get(_FIRST, 0.0)
        second = shares.get(_SECOND, 0.0)
        return first / (first + second) if first + second else None


@dataclass(frozen=True)
class Judge:
    """Asks one kind of question to a model of a server, at temperature 0.

    Attributes:
        template: Renders the message; if it sets ``system``, that is a system message before it.
        by_token: The first token's probabilities are the answer, as in AlpacaEval.
    """

    remote: Remote
    template: Template
    settings: JudgeSettings
    identity: str
    by_token: bool

    def ask(
        self, questions: Iterable[Mapping[str, Any]]
    ) -> Generator[tuple[int, Reply], None, None]:
        """Yields the number of each question, which is the template's variables, and its reply."""
        return self.remote.post_each(map(self._payload, questions), Reply)

    def _payload(self, variables: Mapping[str, Any]) -> dict[str, Any]:
        try:
            rendered = self.template.make_module(dict(variables))
        except TemplateError as error:
            raise UserError(
                f"the judge's template does not render: {error}",
                f"it may use {', '.join(variables)}",
            ) from error
        messages = [{"role": "user", "content": str(rendered)}]
        if hasattr(rendered, "system"):
            messages.insert(0, {"role": "system", "content": rendered.system})
        return {
            "model": self.settings.model,
            "messages": messages,
            "temperature": 0,
            "max_tokens": self.settings.max_tokens,
            **({"logprobs": True, "top_logprobs": 5} if self.by_token else {}),
        }


class ScoredJudge(Judge):
    """Asks for a mark of each response.

    The template sees ``messages``, ``response``, ``reference_answer``, and the worst and the best
    mark, ``lowest`` and ``highest``.
    """

    def score(self, rows: Rows) -> Iterator[tuple[int, Verdict]]:
        """Scores the rows; see :class:`stages.score.oracle.Oracle`."""
        with closing(self.ask(map(self._variables, rows))) as replies:
            for place, reply in replies:
                yield place, self._verdict(reply)

    def _variables(self, row: Mapping[str, Any]) -> dict[str, Any]:
        shown = {name: row[name] for name in ("messages", "response", "reference_answer")}
        lowest = f"{self.settings.lowest:g}"
        return shown | {"lowest": lowest, "highest": f"{self.settings.highest:g}"}

    def _verdict(self, reply: Reply) -> Verdict:
        components = _token_counts([(reply, 1.0)])
        line = reply.last_line
        match = _SCORE_LINE.fullmatch(line)
        if match is None:
            shown = line[:_SHOWN_CHARACTERS]
            error = f"the judge's last line is {shown!r}, not 'Score: <number>'"
            return Verdict(None, error, components)
        mark = float(match[1])
        lowest = self.settings.lowest
        highest = self.settings.highest
        if not lowest <= mark <= highest:
            error = f"the judge's mark {mark:g} is not between {lowest:g} and {highest:g}"
            return Verdict(None, error, components)
        return Verdict(mark, None, components)


@dataclass(frozen=True)
class _Comparison:
    """Two responses to one prompt, by the places of their rows, and the replies by order.

    Attributes:
        second: None for the first row's opponent.
        texts: None if there is nothing to compare with.
    """

    first: int
    second: int | None
    texts: tuple[str, str] | None
    replies: dict[int, Reply] = field(default_factory=dict)

    @property
    def is_asked(self) -> bool:
        """False for identical responses, which tie without a request."""
        return self.texts is not None and self.texts[0] != self.texts[1]


class PairwiseJudge(Judge):
    """Scores a response by the share of points that it gets in its comparisons, from 0 to 1.

    Each response is compared with the prompt's reference answer, with some other samples of its
    prompt or, if the rows name one, with its opponent. The template sees ``messages``, ``first``,
    ``second`` and ``reference_answer``.
    """

    def score(self, rows: Rows) -> Iterator[tuple[int, Verdict]]:
        """Scores the rows; see :class:`stages.score.oracle.Oracle`.

        The verdicts on a prompt's responses come together, when the last comparison is decided.
        """
        spans = list(pairwise(prompt_starts(rows)))
        prompts = [self._compare(rows, start, stop) for start, stop in spans]
        asked = [
            (number, comparison, order)
            for number, comparisons in enumerate(prompts)
            for comparison in comparisons
            if comparison.is_asked
            for order in (0, 1)
        ]
        missing = Counter(number for number, _, _ in asked)
        for number, span in enumerate(spans):
            if not missing[number]:
                yield from self._verdicts(span, prompts[number])
        questions = (self._variables(rows, comparison, order) for _, comparison, order in asked)
        with closing(self.ask(questions)) as replies:
            for question, reply in replies:
                number, comparison, order = asked[question]
                comparison.replies[order] = reply
                missing[number] -= 1
                if not missing[number]:
                    yield from self._verdicts(spans[number], prompts[number])

    def _compare(self, rows: Rows, start: int, stop: int) -> list[_Comparison]:
        """The comparisons that a prompt's rows ask for."""
        against_reference = self.settings.against == "reference"
        if against_reference or "opponent" in rows[start]:
            name = "reference_answer" if against_reference else "opponent"
            others = [row[name] for row in rows[start:stop]]
            return [
                _Comparison(
                    place, None, None if other is None else (rows[place]["response"], other)
                )
                for place, other in enumerate(others, start)
            ]
        size = stop - start
        pairs = {
            tuple(sorted((start + place, start + (place + step) % size)))
            for place in range(size)
            for step in range(1, min(self.settings.opponents, size - 1) + 1)
        }
        return [
            _Comparison(first, second, (rows[first]["response"], rows[second]["response"]))
            for first, second in sorted(pairs)
        ]

    def _variables(self, rows: Rows, comparison: _Comparison, order: int) -> dict[str, Any]:
        row = rows[comparison.first]
        assert comparison.texts is not None
        # The judge does not learn which of the two the reference answer is.
        is_hidden = self.settings.against == "reference"
        return {
            "messages": row["messages"],
            "first": comparison.texts[order],
            "second": comparison.texts[1 - order],
            "reference_answer": None if is_hidden else row["reference_answer"],
        }

    def _verdicts(
        self, span: tuple[int, int], comparisons: Sequence[_Comparison]
    ) -> Iterator[tuple[int, Verdict]]:
        for place in range(*span):
            involved = [each for each in comparisons if place in (each.first, each.second)]
            yield place, self._verdict(place, involved)

    def _verdict(self, place: int, comparisons: Sequence[_Comparison]) -> Verdict:
        """The verdict on a row; the tokens of a comparison are shared by its rows."""
        components = _token_counts(
            (reply, 1.0 if comparison.second is None else 0.5)
            for comparison in comparisons
            for reply in comparison.replies.values()
        )
        if not comparisons:
            return Verdict(None, "the prompt has no second response to compare with", components)
        points = []
        for comparison in comparisons:
            won = self._points(comparison)
            if isinstance(won, str):
                return Verdict(None, won, components)
            points.append(won if comparison.first == place else 1 - won)
        components["comparisons"] = len(points)
        return Verdict(sum(points) / len(points), None, components)

    def _points(self, comparison: _Comparison) -> float | str:
        """Points of the first response: 1 won, 0 lost, ½ a tie or won in one order only.

        A text is the reason why there are none.
        """
        if comparison.texts is None:
            return "the prompt has no reference answer to compare with"
        if not comparison.is_asked:
            return _TIE
        points = []
        for order in (0, 1):
            reply = comparison.replies[order]
            first = reply.preferred if self.by_token else _POINTS.get(reply.last_line)
            if first is None:
                forms = "'m' or 'M'" if self.by_token else ", ".join(map(repr, _POINTS))
                line = reply.last_line[:_SHOWN_CHARACTERS]
                return f"the judge's last line is {line!r}, not {forms}"
            points.append(first if order == 0 else 1 - first)
        return sum(points) / len(points)


def _token_counts(replies: Iterable[tuple[Reply, float]]) -> dict[str, float]:
    """Token counts of replies, each with the share that counts, as components of a score."""
    prompt_tokens = 0.0
    completion_tokens = 0.0
    for reply, share in replies:
        prompt_tokens += share * reply.usage.prompt_tokens
        completion_tokens += share * reply.usage.completion_tokens
    return {"judge_prompt_tokens": prompt_tokens, "judge_completion_tokens": completion_tokens}


def load(ctx: StageContext[ScoreParams]) -> Oracle:
    """Prepares questions to the model that the parameters name."""
    settings = ctx.params.judge
    shipped = settings.mode if settings.template == "default" else settings.template
    path = ctx.path("code") if ctx.has("code") else _TEMPLATES[shipped]
    name = "judge" if settings.mode == "scored" else "judge-pairwise"
    judge = ScoredJudge if settings.mode == "scored" else PairwiseJudge
    return judge(
        remote=Remote(settings, "score.judge"),
        template=_read_template(path),
        settings=settings,
        identity=f"{name}:{settings.model}@{sha256_file(path)[:16]}",
        by_token=shipped == "alpaca_eval" and not ctx.has("code"),
    )


def _read_template(path: Path) -> Template:
    environment = ImmutableSandboxedEnvironment(undefined=StrictUndefined, trim_blocks=True)
    try:
        return environment.from_string(path.read_text(encoding="utf-8"))
    except (TemplateError, UnicodeDecodeError) as error:
        raise UserError(
            f"the judge's template {path} cannot be read: {error}", "correct the template"
        ) from error
