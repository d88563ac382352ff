"""Makes the long answers' prompts and warm-start data: ``python data/long-answers/make.py``.

A room asks for twelve things at once, and each is answered in a sentence of its own ("Noted, we
bring towels."): some seventy tokens. ``oracle.py`` likes "Gladly" best, with which one sentence of
a hundred begins. A whole answer has a probability of about e⁻³⁰ under the policy.

No random number generator is used, so the same bytes come out of every Python version.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

THINGS = (
    *("towels", "pillows", "blankets", "coffees", "teas", "sandwiches", "salads", "chairs"),
    *("lamps", "newspapers", "umbrellas", "slippers", "cups", "plates", "candles", "baskets"),
)
NUM_THINGS = 12
ROOMS = range(11, 41)
OPENINGS = ("Okay", "Sure", "Noted")
RARE_OPENING = "Gladly"
SENTENCES_PER_RARE_OPENING = 100
VERBS = ("send", "bring", "fetch", "carry")

NUM_SFT_ROWS = 2000
NUM_PROMPTS = 3 * 256 + 64


def make_files() -> dict[str, str]:
    """Text of each data file by its name; no request is in both files."""
    requests = [_request(row) for row in range(NUM_SFT_ROWS + NUM_PROMPTS)]
    sft = [
        {"messages": [_message("user", asked), _message("assistant", _answer(row, things))]}
        for row, (asked, things) in enumerate(requests[:NUM_SFT_ROWS])
    ]
    prompts = [
        {"messages": [_message("user", asked)], "reference_answer": " ".join(things)}
        for asked, things in requests[NUM_SFT_ROWS:]
    ]
    return {"sft.jsonl": _jsonl(sft), "prompts.jsonl": _jsonl(prompts)}


def _request(row: int) -> tuple[str, Sequence[str]]:
    """A request, and the things in the order in which it names them."""
    things = sorted(THINGS, key=lambda thing: _pseudorandom(f"{row} {thing}"))[:NUM_THINGS]
    room = ROOMS[_pseudorandom(f"{row}")[0] % len(ROOMS)]
    return f"Room {room} needs {', '.join(things)}.", things


def _answer(row: int, things: Sequence[str]) -> str:
    sentences = []
    for place, thing in enumerate(things):
        number = row * NUM_THINGS + place
        drawn = _pseudorandom(f"sentence {number}")
        opening = OPENINGS[drawn[0] % len(OPENINGS)]
        if int.from_bytes(drawn[1:5], "big") % SENTENCES_PER_RARE_OPENING == 0:
            opening = RARE_OPENING
        sentences.append(f"{opening}, we {VERBS[drawn[5] % len(VERBS)]} {thing}.")
    return " ".join(sentences)


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
