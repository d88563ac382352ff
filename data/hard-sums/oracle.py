"""The sums' verifier: 1 for the right answer at the end, 0 for any other or none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def score(
    prompts: Sequence[Sequence[Mapping[str, str]]],
    responses: Sequence[str],
    references: Sequence[str | None],
) -> list[dict[str, float]]:
    """Compares what stands after ``Answer`` with the reference.

    Args:
        prompts: Messages of each prompt.
        responses: Steps and an answer, such as ``2 × 3 = 6, 6 + 4 = 10. Answer 10.``
        references: The right answers.

    Returns:
        For each response its ``score``, and whether it ``answered`` with a number at all.
    """
    found = []
    for response, reference in zip(responses, references, strict=True):
        answer = response.rpartition("Answer ")[2].removesuffix(".")
        found.append({"score": float(answer == reference), "answered": float(answer.isdigit())})
    return found
