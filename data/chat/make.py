"""Makes the prompts of the chat task: ``python data/chat/make.py``.

A prompt asks for one sentence on a topic under two rules that a program can check. ``other.jsonl``
has rules of other kinds than the prompts that are trained on. In five of six
prompts of ``rare.jsonl`` the base hardly ever keeps one rule: small letters, or an exclamation mark
at the end.

No random number generator is used, so the same bytes come out of every Python version.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Sequence
from pathlib import Path

# fmt: off
TOPICS = (
    "rivers", "bread", "winter", "cats", "trains", "music", "gardens", "coffee", "mountains",
    "libraries", "bees", "bridges", "rain", "chess", "paper", "oceans", "shoes", "maps",
    "candles", "apples", "clocks", "horses", "kites", "forests", "islands", "tea", "wolves",
    "stars", "windows", "pianos", "deserts", "markets", "boats", "snow", "doctors", "soup",
    "owls", "castles", "letters", "volcanoes", "bicycles", "spiders", "honey", "radios",
    "ships", "tomatoes", "mirrors", "planets", "dancing", "cities",
)
# fmt: on
OPENINGS = ("Today", "Sometimes", "Perhaps", "Everywhere")
WORDS = ("green", "together", "quiet", "seven", "because", "morning")
LIMITS = (8, 10, 12)

Rule = dict[str, str | int]
Pair = tuple[tuple[str, Rule], tuple[str, Rule]]
TRAINED: tuple[tuple[str, Rule], ...] = (
    ("Use only lowercase letters.", {"rule": "lowercase"}),
    ("Use no commas.", {"rule": "no_commas"}),
    ("End with an exclamation mark.", {"rule": "ends_with", "text": "!"}),
    *((f"Use at most {limit} words.", {"rule": "at_most", "words": limit}) for limit in LIMITS),
    *(
        (f'Begin with the word "{each}".', {"rule": "begins_with", "text": each})
        for each in OPENINGS
    ),
    *((f'Use the word "{each}".', {"rule": "contains", "text": each}) for each in WORDS),
)
OTHER: tuple[tuple[str, Rule], ...] = (
    ("Use only capital letters.", {"rule": "uppercase"}),
    ("End with a question mark.", {"rule": "ends_with", "text": "?"}),
    ("Put the sentence in double quotation marks.", {"rule": "quoted"}),
    ('Do not use the word "the".', {"rule": "lacks", "text": "the"}),
)
# Two openings, or small letters after a capital one, cannot both be had.
APART = ({"begins_with"}, {"at_most"}, {"begins_with", "lowercase"}, {"uppercase", "quoted"})

RARE = {"lowercase", "ends_with"}

NUM_TRAINED, NUM_OTHER = 3 * 256 + 128, 96
NUM_RARE, NUM_USUAL = 213, 43


def make_files() -> dict[str, str]:
    """Text of each data file by its name."""
    pairs = _pairs(TRAINED)
    rare = _rows([pair for pair in pairs if _is_rare(pair)])[:NUM_RARE]
    rare += _rows([pair for pair in pairs if not _is_rare(pair)])[:NUM_USUAL]
    return {
        "prompts.jsonl": _jsonl(_rows(_pairs(TRAINED))[:NUM_TRAINED]),
        "other.jsonl": _jsonl(_rows(_pairs(OTHER))[:NUM_OTHER]),
        "rare.jsonl": _jsonl(rare),
    }


def _pairs(rules: Sequence[tuple[str, Rule]]) -> list[Pair]:
    return [pair for pair in itertools.combinations(rules, 2) if _fit(pair)]


def _is_rare(pair: Pair) -> bool:
    return any(rule["rule"] in RARE for _, rule in pair)


def _rows(pairs: Sequence[Pair]) -> list[dict[str, str]]:
    """A prompt for each topic and pair of rules, in an order that looks like a random one."""
    rows = [
        {
            "prompt": f"Write one sentence about {topic}. {first} {second}",
            "reference_answer": json.dumps({"topic": topic, "rules": [one, two]}),
        }
        for topic, ((first, one), (second, two)) in itertools.product(TOPICS, pairs)
    ]
    return sorted(rows, key=_order)


def _order(row: dict[str, str]) -> bytes:
    return hashlib.sha256(row["prompt"].encode()).digest()


def _jsonl(rows: Sequence[dict[str, str]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in sorted(rows, key=_order))


def _fit(pair: Pair) -> bool:
    kinds = [str(rule["rule"]) for _, rule in pair]
    return not any(kinds[0] in group and kinds[1] in group for group in APART)


def main(folder: Path) -> None:
    """Writes the data files into a folder."""
    for name, text in make_files().items():
        (folder / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(Path(__file__).parent)
