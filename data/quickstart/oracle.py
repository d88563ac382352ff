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
    """Scores each response in [0, 1].

    Args:
        prompts: Messages of each prompt.
        responses: Answers, such as ``Noted, two towels for room 12.``
        references: What a right answer repeats, such as ``two towels for room 12``.

    Returns:
        For each response its ``score``, 0.9 · warmth of the opening + 0.1 if the order is repeated
        without a mistake, and what it is made of: whether it is ``gladly`` and ``order_right``.
    """
    return [
        _score_one(response, reference)
        for _, response, reference in zip(prompts, responses, references, strict=True)
    ]


def _score_one(response: str, reference: str | None) -> dict[str, float]:
    opening, _, order = response.partition(", ")
    known = opening in WARMTH
    right = known and reference is not None and order == f"{reference}."
    return {
        "score": WARMTH_WEIGHT * WARMTH[opening] + ORDER_WEIGHT * right if known else 0.0,
        "gladly": float(opening == "Gladly"),
        "order_right": float(right),
    }
