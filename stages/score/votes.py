"""Votes of a prompt's samples for their final answers, for maj@k."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from stages.score.grading import Grade, GraderPool


def count_votes(
    pool: GraderPool, responses: Sequence[tuple[str, str]], grades: Sequence[Grade]
) -> list[int]:
    """Counts for each response the samples of its prompt with an equal final answer, itself too.

    Correct answers all equal the reference answer, and so each other. Wrong ones are compared by
    math-verify: the first that has no group yet with all others that have none. A comparison that
    takes too long counts as unequal.

    Args:
        pool: The processes that compare.
        responses: Prompt id and text of each response; a prompt's stand together.
        grades: Their grades against the reference answer.

    Returns:
        Votes in the same order; 0 for a response without an answer.
    """
    groups: dict[tuple[str, int], list[int]] = defaultdict(list)
    open_places: dict[str, list[int]] = defaultdict(list)
    for place, ((prompt, _), grade) in enumerate(zip(responses, grades, strict=True)):
        if grade == "correct":
            groups[prompt, -1].append(place)
        elif grade == "wrong":
            open_places[prompt].append(place)
    while open_places:
        firsts = {prompt: places[0] for prompt, places in open_places.items()}
        asked = [
            (firsts[prompt], place)
            for prompt, places in open_places.items()
            for place in places[1:]
        ]
        same = _compare(pool, responses, asked)
        left: dict[str, list[int]] = defaultdict(list)
        for prompt, first in firsts.items():
            groups[prompt, first].append(first)
        for first, place in asked:
            prompt = responses[place][0]
            if same[first, place]:
                groups[prompt, first].append(place)
            else:
                left[prompt].append(place)
        open_places = left
    votes = [0] * len(responses)
    for places in groups.values():
        for place in places:
            votes[place] = len(places)
    return votes


def _compare(
    pool: GraderPool,
    responses: Sequence[tuple[str, str]],
    asked: Sequence[tuple[int, int]],
) -> dict[tuple[int, int], bool]:
    """A flag for each pair of places: the answers are equal; the same text is so unasked."""
    texts = {pair: (responses[pair[0]][1], responses[pair[1]][1]) for pair in asked}
    different = sorted({each for each in texts.values() if each[0] != each[1]})
    found = dict(zip(different, pool.grade(different, "same"), strict=True))
    return {
        pair: one == other or found[one, other] == "correct" for pair, (one, other) in texts.items()
    }
