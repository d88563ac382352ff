"""The pages of the documentation: their length, and the settings and fragments that they show."""

import dataclasses
import inspect
import re
from collections import defaultdict

import pytest
import yaml

from flows.pipeline.fields import run_rows
from flows.pipeline.loading import load_config
from tests.flows.loop import ROOT

PAGES = [ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
LANDING = ROOT / "README.md"
NUM_PAGES = 14
MOST_WORDS = 4_000
MOST_WORDS_TOGETHER = 25_000
# Words in a row that two pages may not share.
SEQUENCE = 7


def prose(page):
    """Words of a page in lower case, without blocks of code, targets of links and marks."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"^    .*$", "", text, flags=re.MULTILINE)
    text = re.sub(r"\]\([^)]*\)", "]", text)
    return re.findall(r"[\w'.=/-]*\w", text.lower())


def test_fourteen_pages_have_at_most_25_000_words():
    counts = {page.name: len(page.read_text().split()) for page in PAGES}
    assert len(counts) == NUM_PAGES
    assert {name for name, count in counts.items() if count > MOST_WORDS} == set()
    assert sum(counts.values()) <= MOST_WORDS_TOGETHER


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_opens_with_what_its_reader_can_do(page):
    opening = page.read_text().split("\n\n")[1]
    assert re.match(r"After this page you (can|know)\b", opening)


def test_no_two_pages_share_a_sequence_of_words():
    places = defaultdict(set)
    for page in [LANDING, *PAGES]:
        words = prose(page)
        for start in range(len(words) - SEQUENCE + 1):
            places[" ".join(words[start : start + SEQUENCE])].add(page.name)
    shared = {words: sorted(names) for words, names in places.items() if len(names) > 1}
    assert shared == {}


SECTIONS = re.split(r"^## ", (ROOT / "docs/migrating.md").read_text(), flags=re.MULTILINE)[1:]
OURS = re.compile(
    r"`((?:inputs|prepare|generate|score|pair|train|execution)\.[\w.]+|iterations)(?=[:`])"
)


def columns(section, number):
    rows = [line for line in section.splitlines() if line.startswith("| ")]
    return [re.split(r"(?<!\\) \| ", row.strip("| "))[number] for row in rows[2:]]


@pytest.mark.parametrize("section", SECTIONS, ids=lambda text: text.splitlines()[0])
def test_settings_exist(section):
    names = {row.name for row in run_rows()}
    named = [name for cell in columns(section, 1) for name in OURS.findall(cell)]
    assert len(named) >= 2
    assert not set(named) - names


def test_options_of_trl_s_trainer_exist(monkeypatch):
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    from trl.experimental.online_dpo import OnlineDPOConfig, OnlineDPOTrainer

    [section] = [section for section in SECTIONS if section.startswith("TRL: OnlineDPOTrainer")]
    names = {field.name for field in dataclasses.fields(OnlineDPOConfig)}
    names |= set(inspect.signature(OnlineDPOTrainer.__init__).parameters)
    named = [name for cell in columns(section, 0) for name in re.findall(r"`(\w+)`", cell)]
    assert len(named) > 10
    assert not set(named) - names


PAGE = ROOT / "docs/clusters.md"
FRAGMENTS = dict(
    re.findall(
        r"^### ([^\n]+)\n(?:(?!^###? ).)*?^```yaml\n(.*?)^```", PAGE.read_text(), re.M | re.S
    )
)


@pytest.mark.parametrize("title", FRAGMENTS)
def test_a_fragment_is_accepted(title, tmp_path):
    path = tmp_path / "fragment.yaml"
    path.write_text(f"extends: {ROOT / 'configs/quickstart.yaml'}\n" + FRAGMENTS[title])
    config = load_config(path)
    runner = yaml.safe_load(FRAGMENTS[title])["execution"]["runner"]
    assert config.execution.runner == runner


def test_every_fragment_of_the_page_is_read():
    assert len(FRAGMENTS) == PAGE.read_text().count("```yaml\n")
