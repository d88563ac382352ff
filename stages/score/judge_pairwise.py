"""Comparisons by a judge: of two samples, of a sample and the base's, or of a reference answer.

Judges prefer the answer that they read first (or last) whatever it says: so each comparison is
asked twice with the answers swapped, and what does not survive the swap counts as a tie.

Shapes: ``K`` responses per prompt.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import Any, NamedTuple

from stages.score.judge_question import REPEAT_AGREEMENT, Question, Reply, token_components
from stages.score.oracle import Verdict, prompt_starts

# Share of the point that the answer shown as A gets.
_POINTS = {"Verdict: A": 1.0, "Verdict: B": 0.0, "Verdict: tie": 0.5}
_TIE = 0.5
# AlpacaEval's names of the answer shown first and of the other.
_FIRST = "m"
_SECOND = "M"
ORDER_AGREEMENT = "order_agreement"
"""Component: share of comparisons whose verdict survived the swap of the two."""
Rows = Sequence[Mapping[str, Any]]


class Reading(NamedTuple):
    """A way to read a reply."""

    points: Callable[[Reply], float | None]
    """Points of the answer shown first; None if the reply tells none."""
    forms: str
    """Form of a reply's last line, for a message."""


def _preferred(reply: Reply) -> float | None:
    """The preference for the answer shown first: p(m) / (p(m) + p(M)).

    AlpacaEval's parser ``logprob_parser`` reads the same tokens. A server that tells no
    probabilities is taken at its word.
    """
    told = {each.token: math.exp(each.logprob) for each in reply.first_tokens}
    if not told:
        return {_FIRST: 1.0, _SECOND: 0.0}.get(reply.last_line)
    first = told.get(_FIRST, 0.0)
    second = told.get(_SECOND, 0.0)
    return first / (first + second) if first + second else None


VERDICT = Reading(
    lambda reply: _POINTS.get(reply.last_line), "'Verdict: A', 'Verdict: B' or 'Verdict: tie'"
)
"""The last line is a verdict."""
PREFERENCE = Reading(_preferred, "'m' or 'M'")
"""The first token names the better answer, as AlpacaEval's default annotator asks for it."""


@dataclass(frozen=True)
class _Comparison:
    """Two responses to one prompt, by the places of their rows."""

    first: int
    second: int | None
    """None for the first row's opponent."""
    texts: tuple[str, str] | None
    """None if there is nothing to compare with."""

    @property
    def is_asked(self) -> bool:
        """True if the judge is asked; the same text twice is a tie unasked."""
        return self.texts is not None and self.texts[0] != self.texts[1]


@dataclass(frozen=True)
class PairwiseJudge:
    """Scores a response by the share of points that it gets in its comparisons, from 0 to 1.

    Each response is compared with the prompt's reference answer, with some other samples of its
    prompt or, if the rows name one, with its opponent. The question's template sees ``messages``,
    ``first``, ``second`` and ``reference_answer``.
    """

    question: Question
    identity: str
    num_opponents: int | None
    """Number of the following samples that each one is compared with; None compares with the
    reference answer."""
    passes: int = 1
    """Times that each order is asked."""
    reading: Reading = VERDICT

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
            texts = [(row["response"], row[other]) for row in rows[start:stop]]
            return [
                _Comparison(place, None, None if each[1] is None else each)
                for place, each in enumerate(texts, start)
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
        components = token_components(replies)
        if comparison.texts is None:
            return Verdict(None, "the prompt has no reference answer to compare with", components)
        if not replies:
            return Verdict(_TIE, None, components)
        found = [self.reading.points(each) for each in replies]
        if None in found:
            said = replies[found.index(None)].last_line[:80]
            reason = f"the judge's last line is {said!r}, not {self.reading.forms}"
            return Verdict(None, reason, components)
        points = [each for each in found if each is not None]
        as_a = points[: self.passes]
        as_b = [1 - each for each in points[self.passes :]]
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
    components = token_components(())
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
