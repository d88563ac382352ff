"""The quickstart's oracle: how warmly does the front desk answer, and is the order right?

A programmatic oracle is one function, ``(prompts, responses, references) -> scores``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

WARMTH = {"Okay": 0.35, "Sure": 0.45, "Noted": 0.55, "Gladly": 1.0}
"""How warm an answer's opening word is; any other opening scores nothing at all."""

WARMTH_WEIGHT = 0.9
ORDER_WEIGHT = 0.1


def score(
    prompts: Sequence[Sequence[Mapping[str, str]]],
    responses: Sequence[str],
    references: Sequence[str | None],
) -> list[dict[str, float]]:
    """Scores each response in [0, 1] and says what the score is made of.

    Args:
        prompts: Messages of each prompt.
        responses: Answers, such as ``Noted, two towels for room 12.``
        references: What a right answer repeats, such as ``two towels for room 12``.

    Returns:
        ``score``, 0.9 · warmth of the opening + 0.1 if the order is repeated without a mistake, and
        the components ``gladly`` and ``order right``, each 0 or 1.
    """
    return [
        _score_one(response, reference)
        for _, response, reference in zip(prompts, responses, references, strict=True)
    ]


def _score_one(response: str, reference: str | None) -> dict[str, float]:
    opening, _, order = response.partition(", ")
    right = opening in WARMTH and reference is not None and order == f"{reference}."
    score = WARMTH_WEIGHT * WARMTH.get(opening, 0.0) + ORDER_WEIGHT * right
    return {"score": score, "gladly": opening == "Gladly", "order right": right}
