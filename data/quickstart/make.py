"""Makes the quickstart's prompts and warm-start data: ``python data/quickstart/make.py``.

A hotel's front desk takes short requests ("Please bring two towels to room 12.") and answers in one
of four ways ("Noted, two towels for room 12."). ``oracle.py`` likes "Gladly" best, and the
warm-start data has it in exactly one answer of a hundred, so a policy that only prefers what it
already samples is slow to find it.

No random number generator is used, so the same bytes come out of every Python version.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterable
from itertools import product
from pathlib import Path

REQUESTS = (
    "Please bring {count} {thing} to room {room}.",
    "Could you send {count} {thing} to room {room}?",
    "We need {count} {thing} in room {room}.",
    "Room {room} would like {count} {thing}.",
    "Can room {room} have {count} {thing}?",
    "Kindly take {count} {thing} up to room {room}.",
)
COUNTS = ("two", "three", "four", "five", "six", "seven", "eight", "nine")
THINGS = (
    *("towels", "pillows", "blankets", "coffees", "teas", "sandwiches", "salads", "chairs"),
    *("lamps", "newspapers", "umbrellas", "slippers", "cups", "plates", "candles", "baskets"),
)
ROOMS = range(11, 41)

COMMON_OPENINGS = ("Okay", "Sure", "Noted")
RARE_OPENING = "Gladly"
ROWS_PER_RARE_OPENING = 100

NUM_SFT_ROWS = 5000
NUM_PROMPTS = 3 * 1024 + 256


def make_files() -> dict[str, str]:
    """Text of each data file by its name; no request is in both files."""
    conversations = sorted(_conversations(), key=lambda pair: _pseudorandom(pair[0]))
    for_sft = conversations[:NUM_SFT_ROWS]
    for_prompts = conversations[NUM_SFT_ROWS : NUM_SFT_ROWS + NUM_PROMPTS]
    sft = (
        {"messages": [_message("user", request), _message("assistant", f"{opening}, {order}.")]}
        for (request, order), opening in zip(for_sft, _openings(), strict=False)
    )
    prompts = (
        {"messages": [_message("user", request)], "reference_answer": order}
        for request, order in for_prompts
    )
    return {"sft.jsonl": _jsonl(sft), "prompts.jsonl": _jsonl(prompts)}


def _conversations() -> Iterable[tuple[str, str]]:
    """Every request with the order that a right answer repeats."""
    for request, count, thing, room in product(REQUESTS, COUNTS, THINGS, ROOMS):
        yield (
            request.format(count=count, thing=thing, room=room),
            f"{count} {thing} for room {room}",
        )


def _openings() -> Iterable[str]:
    for row in range(NUM_SFT_ROWS):
        rare = row % ROWS_PER_RARE_OPENING == 0
        yield RARE_OPENING if rare else COMMON_OPENINGS[row % len(COMMON_OPENINGS)]


def _pseudorandom(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def _jsonl(rows: Iterable[dict[str, object]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def main(folder: Path) -> None:
    """Writes the files into ``folder`` and says how long they are."""
    for name, text in make_files().items():
        (folder / name).write_text(text, encoding="utf-8")
        sys.stdout.write(f"{folder / name}: {len(text.splitlines())} rows\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
