"""The pages of the documentation are short, and none repeats a sentence of another."""

import re
from collections import defaultdict
from pathlib import Path

import pytest

from tests.site.test_commands import ROOT

PAGES = [ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
LANDING = ROOT / "README.md"
NUM_PAGES = 14
MOST_WORDS = 4_000
MOST_WORDS_TOGETHER = 25_000
# Words in a row that two pages may not share.
SEQUENCE = 7


def prose(page: Path) -> list[str]:
    """Words of a page in lower case, without blocks of code, targets of links and marks."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"^    .*$", "", text, flags=re.MULTILINE)
    text = re.sub(r"\]\([^)]*\)", "]", text)
    return re.findall(r"[\w'.=/-]*\w", text.lower())


def test_fourteen_pages_have_at_most_25_000_words() -> None:
    counts = {page.name: len(page.read_text().split()) for page in PAGES}
    assert len(counts) == NUM_PAGES
    assert {name for name, count in counts.items() if count > MOST_WORDS} == set()
    assert sum(counts.values()) <= MOST_WORDS_TOGETHER


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_opens_with_what_its_reader_can_do(page: Path) -> None:
    opening = page.read_text().split("\n\n")[1]
    assert re.match(r"After this page you (can|know)\b", opening)


def test_no_two_pages_share_a_sequence_of_words() -> None:
    places = defaultdict(set)
    for page in [LANDING, *PAGES]:
        words = prose(page)
        for start in range(len(words) - SEQUENCE + 1):
            places[" ".join(words[start : start + SEQUENCE])].add(page.name)
    shared = {words: sorted(names) for words, names in places.items() if len(names) > 1}
    assert shared == {}
