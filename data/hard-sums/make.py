"""Makes the sums' prompts and warm-start data: ``python data/hard-sums/make.py``.

A sum has products in it ("Compute 2 × 3 + 4 + 5 × 3 + 2."), and is worked out step by step ("2 × 3
= 6, 5 × 3 = 15, 6 + 4 = 10, …. Answer 27."). In the warm-start data three products of four are
wrong: the factors are added. So a policy trained on it solves a sum with two products once in
sixteen tries, and one with three once in sixty-four. A quarter of that data are sums of larger
numbers without products, so that the additions of right answers are known, too.

No random number generator is used, so the same bytes come out of every Python version.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

FACTORS = (2, 3, 4, 5)
ADDENDS = (1, 2, 3, 4, 5)
NUM_ADDENDS = 2
TOTALS, LARGER = range(4, 76), range(3, 26)
PRODUCTS_OF_SFT = (0, 1, 2, 3)
PRODUCTS, LONGER_PRODUCTS = 2, 3
STEPS_PER_RIGHT_PRODUCT = 4

NUM_SFT_ROWS = 6000
NUM_PROMPTS = 3 * 256 + 128
NUM_LONGER = 64

Term = tuple[int, ...]


def make_files() -> dict[str, str]:
    """Text of each data file by its name; no sum is in two files."""
    sft, sums, longer = [], [], []
    seen: set[tuple[Term, ...]] = set()
    for row in range(NUM_SFT_ROWS):
        terms = _new(seen, "sft", row, PRODUCTS_OF_SFT[row % len(PRODUCTS_OF_SFT)])
        sft.append(
            {"messages": [_message("user", _asked(terms)), _message("assistant", _worked(terms))]}
        )
    for row in range(NUM_PROMPTS):
        sums.append(_prompt(_new(seen, "prompts", row, PRODUCTS)))
    for row in range(NUM_LONGER):
        longer.append(_prompt(_new(seen, "longer", row, LONGER_PRODUCTS)))
    return {
        "sft.jsonl": _jsonl(sft),
        "prompts.jsonl": _jsonl(sums),
        "longer.jsonl": _jsonl(longer),
    }


def _new(seen: set[tuple[Term, ...]], file: str, row: int, products: int) -> tuple[Term, ...]:
    """Terms of a new sum; of those with fewer products there are few, and they repeat."""
    attempt = 0
    while True:
        terms = _terms(f"{file} {row} {attempt}", products)
        if terms not in seen or products < PRODUCTS:
            seen.add(terms)
            return terms
        attempt += 1


def _terms(name: str, products: int) -> tuple[Term, ...]:
    """Products and addends in an order that the name gives."""
    drawn = iter(hashlib.sha256(name.encode()).digest())
    if products == 0:
        return tuple((each[next(drawn) % len(each)],) for each in (TOTALS, LARGER, ADDENDS))
    terms: list[Term] = []
    while len(terms) < products:
        pair = (FACTORS[next(drawn) % len(FACTORS)], FACTORS[next(drawn) % len(FACTORS)])
        # 2 × 2 is 2 + 2, which tells nothing.
        terms.append(pair if pair != (2, 2) else (2, 3))
    terms += [(ADDENDS[next(drawn) % len(ADDENDS)],) for _ in range(NUM_ADDENDS)]
    return tuple(sorted(terms, key=lambda term: _pseudorandom(f"{name} {term}")))


def _asked(terms: Sequence[Term]) -> str:
    return f"Compute {' + '.join(' × '.join(map(str, term)) for term in terms)}."


def _worked(terms: Sequence[Term]) -> str:
    """Steps and answer, with a product that is right once in four times."""
    steps, values = [], []
    for place, term in enumerate(terms):
        value = term[0]
        if len(term) > 1:
            drawn = _pseudorandom(f"{terms} {place}")[0] % STEPS_PER_RIGHT_PRODUCT
            value = term[0] * term[1] if drawn == 0 else term[0] + term[1]
            steps.append(f"{term[0]} × {term[1]} = {value}")
        values.append(value)
    total = values[0]
    for value in values[1:]:
        steps.append(f"{total} + {value} = {total + value}")
        total += value
    return f"{', '.join(steps)}. Answer {total}."


def _prompt(terms: Sequence[Term]) -> dict[str, object]:
    right = sum(term[0] * term[1] if len(term) > 1 else term[0] for term in terms)
    return {"messages": [_message("user", _asked(terms))], "reference_answer": str(right)}


def _pseudorandom(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def _jsonl(rows: Iterable[dict[str, object]]) -> str:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def main(folder: Path) -> None:
    """Writes the files into ``folder`` and says how long they are."""
    for name, text in make_files().items():
        (folder / name).write_text(text, encoding="utf-8")
        sys.stdout.write(f"{folder / name}: {len(text.splitlines())} rows\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
