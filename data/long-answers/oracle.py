"""The long answers' oracle: how warm is each sentence, and does it name the right thing?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

WARMTH = {"Okay": 0.35, "Sure": 0.45, "Noted": 0.55, "Gladly": 1.0}
"""Score of a sentence by its opening word, 0 to 1; openings that are not listed score 0."""

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
        responses: Sentences such as ``Noted, we bring towels.``, one for each thing.
        references: The things in their order, spaces between them.

    Returns:
        For each response its ``score``, the mean over the things asked for of 0.9 · warmth of the
        sentence in its place + 0.1 if the sentence names it, and what it is made of: the share that
        open with ``gladly`` and the share with ``order_right``. A sentence too many counts nothing.
    """
    return [
        _score_one(response, (reference or "").split())
        for response, reference in zip(responses, references, strict=True)
    ]


def _score_one(response: str, things: Sequence[str]) -> dict[str, float]:
    sentences = [each.strip() for each in response.split(".") if each.strip()]
    warmth = gladly = right = 0.0
    for sentence, thing in zip(sentences, things, strict=False):
        opening = sentence.partition(",")[0]
        warmth += WARMTH.get(opening, 0.0)
        gladly += opening == "Gladly"
        right += opening in WARMTH and sentence.rpartition(" ")[2] == thing
    asked = max(len(things), 1)
    return {
        "score": (WARMTH_WEIGHT * warmth + ORDER_WEIGHT * right) / asked,
        "gladly": gladly / asked,
        "order_right": right / asked,
    }
