"""A judge that compares two responses to a prompt, in both orders.

Judges prefer the answer that they read first (or last) whatever it says: so each comparison is
asked twice with the answers swapped, and what does not survive the swap counts as a tie.

Shapes: ``K`` responses per prompt.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from stages.score.answers import prompt_starts
from stages.score.completion import Question, Reply, Tokens
from stages.score.oracle import Verdict

# Share of the point that the answer shown as A gets.
_POINTS = {"Verdict: A": 1.0, "Verdict: B": 0.0, "Verdict: tie": 0.5}
_TIE = 0.5
REPEAT_AGREEMENT = "repeat_agreement"
"""Component: share of questions whose answer was the same each time."""
ORDER_AGREEMENT = "order_agreement"
"""Component: share of comparisons whose verdict survived the swap of the two."""
Rows = Sequence[Mapping[str, Any]]


@dataclass
class _Comparison:
    """Two responses to one prompt, and what the judge has said so far.

    Attributes:
        first: Place of a row.
        second: Place of another row of the prompt; None for the first row's opponent.
        texts: The two responses.
        passes: Times that each order is asked.
        points: Of the first response, by order (shown as A, shown as B) and pass.
        error: Why there is no result, if there is none.
    """

    first: int
    second: int | None
    texts: tuple[str, str]
    passes: int = 1
    points: dict[tuple[int, int], float] = field(default_factory=dict)
    error: str | None = None
    tokens: Tokens = field(default_factory=Tokens)

    @property
    def is_open(self) -> bool:
        """True where the judge has still to be asked; the same text twice is a tie unasked."""
        if self.error is not None and not self.points:
            # There is nothing to compare with.
            return False
        return self.texts[0] != self.texts[1] and len(self.points) < 2 * self.passes

    @property
    def result(self) -> float | None:
        """Points of the first response: 1 won, 0 lost, ½ a tie or won in one order only."""
        if self.error is not None:
            return None
        return sum(self.points.values()) / len(self.points) if self.points else _TIE

    def agreements(self) -> dict[str, float]:
        """Agreement of the judge with itself, where it was asked more than once."""
        if self.passes == 1 or not self.points:
            return {}
        repeated = [
            len({self.points[order, each] for each in range(self.passes)}) == 1 for order in (0, 1)
        ]
        survived = [self.points[0, each] == self.points[1, each] for each in range(self.passes)]
        return {
            REPEAT_AGREEMENT: sum(repeated) / len(repeated),
            ORDER_AGREEMENT: sum(survived) / len(survived),
        }

    def take(self, order: int, number: int, reply: Reply) -> None:
        """Takes in what the judge said with the first response shown as A (0) or as B (1).

        Args:
            order: 0 or 1.
            number: Pass, from 0.
            reply: Its answer.
        """
        self.tokens = self.tokens.plus(reply.tokens)
        points = _POINTS.get(reply.last_line)
        if points is None:
            self.error = (
                f"the judge's last line is {reply.last_line[:80]!r}, not 'Verdict: A', "
                "'Verdict: B' or 'Verdict: tie'"
            )
            points = _TIE
        self.points[order, number] = points if order == 0 else 1 - points


@dataclass(frozen=True)
class PairwiseJudge:
    """Scores a response by the share of points that it gets in its comparisons, from 0 to 1.

    Each response is compared with the prompt's reference answer, with some other samples of its
    prompt or, where the rows name one, with its opponent.

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
        starts = prompt_starts(rows)
        prompts = [self._compare(rows, start, stop) for start, stop in pairwise(starts)]
        for number, comparisons in enumerate(prompts):
            if not any(each.is_open for each in comparisons):
                yield from _verdicts(starts[number], starts[number + 1], comparisons)
        asked = [
            (number, comparison, order, each)
            for number, comparisons in enumerate(prompts)
            for comparison in comparisons
            if comparison.is_open
            for order in (0, 1)
            for each in range(self.passes)
        ]
        questions = (self._variables(rows, comparison, order) for _, comparison, order, _ in asked)
        with closing(self.question.ask(questions)) as replies:
            for place, reply in replies:
                number, comparison, order, each = asked[place]
                comparison.take(order, each, reply)
                if not any(each.is_open for each in prompts[number]):
                    yield from _verdicts(starts[number], starts[number + 1], prompts[number])

    def _compare(self, rows: Rows, start: int, stop: int) -> list[_Comparison]:
        """The comparisons that a prompt's rows ask for."""
        if self.num_opponents is None:
            return [self._with_reference(rows[place], place) for place in range(start, stop)]
        if "opponent" in rows[start]:
            return [
                _Comparison(
                    place, None, (rows[place]["response"], rows[place]["opponent"]), self.passes
                )
                for place in range(start, stop)
            ]
        size = stop - start
        pairs = {
            (min(place, other), max(place, other))
            for place in range(size)
            for step in range(1, min(self.num_opponents, size - 1) + 1)
            for other in [(place + step) % size]
        }
        return [
            _Comparison(
                start + first,
                start + second,
                (rows[start + first]["response"], rows[start + second]["response"]),
                self.passes,
            )
            for first, second in sorted(pairs)
        ]

    def _with_reference(self, row: Mapping[str, Any], place: int) -> _Comparison:
        reference = row["reference_answer"]
        comparison = _Comparison(place, None, (row["response"], reference or ""), self.passes)
        if reference is None:
            comparison.error = "the prompt has no reference answer to compare with"
        return comparison

    def _variables(self, rows: Rows, comparison: _Comparison, order: int) -> dict[str, Any]:
        row = rows[comparison.first]
        first, second = comparison.texts if order == 0 else comparison.texts[::-1]
        # The judge is not told which of the two the reference answer is.
        reference = None if self.num_opponents is None else row["reference_answer"]
        return {
            "messages": row["messages"],
            "first": first,
            "second": second,
            "reference_answer": reference,
        }


def _verdicts(
    start: int, stop: int, comparisons: Sequence[_Comparison]
) -> Iterator[tuple[int, Verdict]]:
    """The verdicts on a prompt's rows; the tokens of a comparison are shared by its rows."""
    for place in range(start, stop):
        own = [each for each in comparisons if place in (each.first, each.second)]
        tokens = Tokens()
        for each in own:
            tokens = tokens.plus(each.tokens, 0.5 if each.second is not None else 1.0)
        yield place, _verdict(place, own, tokens)


def _verdict(place: int, own: Sequence[_Comparison], tokens: Tokens) -> Verdict:
    components = tokens.components()
    if not own:
        return Verdict(None, "the prompt has no second response to compare with", components)
    error = next((each.error for each in own if each.error is not None), None)
    if error is not None:
        return Verdict(None, error, components)
    results = [each.result for each in own if each.result is not None]
    points = [
        result if each.first == place else 1 - result
        for each, result in zip(own, results, strict=True)
    ]
    agreements = [each.agreements() for each in own if each.agreements()]
    for name in (REPEAT_AGREEMENT, ORDER_AGREEMENT) if agreements else ():
        components[name] = sum(each[name] for each in agreements) / len(agreements)
    return Verdict(sum(points) / len(points), None, {"comparisons": len(points), **components})
