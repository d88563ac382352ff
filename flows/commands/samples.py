"""Sample data of `geb init`: prompts, and conversations from which a tiny model learns to answer.

No random numbers: the same files everywhere.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

NUM_PROMPTS = 640
NUM_CONVERSATIONS = 1500

_ASKING = ("Please bring {} to room {}.", "We need {} in room {}.", "Could room {1} have {0}?")
_NUMBERS = ("two", "three", "four", "five")
_THINGS = ("towels", "pillows", "cups", "keys", "maps", "lamps", "chairs", "plates")
_ROOMS = range(1, 41)
_OPENINGS = ("Okay", "Yes", "Certainly")
# Prime to the number of orders, so that steps of it visit each of them once.
_STRIDE = 1009


def orders() -> Iterator[dict[str, Any]]:
    """Prompts of a hotel's front desk, with what a right answer repeats."""
    found = [
        {
            "prompt": asking.format(f"{number} {thing}", room),
            "reference_answer": f"{number} {thing} for room {room}",
        }
        for asking, number, thing, room in itertools.product(_ASKING, _NUMBERS, _THINGS, _ROOMS)
    ]
    return (found[place * _STRIDE % len(found)] for place in range(len(found)))


def sums() -> Iterator[dict[str, Any]]:
    """Prompts with an answer that can be verified."""
    found = [
        {"prompt": f"What is {a} plus {b}?", "reference_answer": str(a + b)}
        for a, b in itertools.product(range(1, 49), range(1, 81))
    ]
    return (found[place * _STRIDE % len(found)] for place in range(len(found)))


def prompts(kind: str) -> list[dict[str, Any]]:
    """Sample prompts of a kind of task."""
    return list(itertools.islice(_rows(kind), NUM_PROMPTS))


def conversations(kind: str) -> list[dict[str, Any]]:
    """Sample conversations for the warm start, on other prompts than :func:`prompts`."""
    rows = itertools.islice(_rows(kind), NUM_PROMPTS, NUM_PROMPTS + NUM_CONVERSATIONS)
    return [
        {
            "messages": [
                {"role": "user", "content": row["prompt"]},
                {"role": "assistant", "content": _answer(kind, row["reference_answer"], place)},
            ]
        }
        for place, row in enumerate(rows)
    ]


def _rows(kind: str) -> Iterator[dict[str, Any]]:
    return sums() if kind == "answers" else orders()


def _answer(kind: str, reference: str, place: int) -> str:
    if kind == "answers":
        # Every third is wrong: there is something to learn from its rewards.
        wrong = place % len(_OPENINGS) == 0
        return f"It is {int(reference) + 1 if wrong else reference}."
    return f"{_OPENINGS[place % len(_OPENINGS)]}, {reference}."
