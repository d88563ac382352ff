"""docs/equations.md, the registry, the golden rows and the tests name the same things."""

import importlib
import json
import re
import sys
from pathlib import Path

import golden
import pytest

import stages.objectives
from stages.objectives import DESIGNS, DIVERGENCES

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "equations.md").read_text()
COLUMNS = ["symbol", "equation", "paper reference", "function", "test"]


def tables(page):
    """{heading: rows} of the tables with the five columns."""
    found = {}
    for section in re.split(r"^## ", page, flags=re.MULTILINE)[1:]:
        heading, *lines = section.splitlines()
        cells = [
            [c.strip() for c in re.split(r"(?<!\\)\|", line)[1:-1]]
            for line in lines
            if line.startswith("|")
        ]
        if cells and cells[0] == COLUMNS:
            found[heading] = cells[2:]
    return found


TABLES = tables(PAGE)
ROWS = [row for rows in TABLES.values() for row in rows]


def names(heading):
    return [row[0].strip("`") for row in TABLES[heading] if row[0].startswith("`")]


def test_page_has_its_three_tables():
    assert list(TABLES) == ["Divergences", "Bonuses", "Losses and conditions"]


def test_designs_agree():
    in_golden = {case["design"] for case in json.loads(golden.GOLDEN_FILE.read_text())["bonus"]}
    assert names("Bonuses") == list(DESIGNS)
    assert in_golden == set(DESIGNS)
    assert list(golden.BONUSES) == list(DESIGNS)


def test_divergences_agree():
    in_golden = {c["divergence"] for c in json.loads(golden.GOLDEN_FILE.read_text())["reward"]}
    assert names("Divergences") == list(DIVERGENCES)
    assert in_golden >= set(DIVERGENCES)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_functions_exist(row):
    module, name = row[3].strip("`").split(".")
    # The conditions of the theorems are helpers of the tests.
    place = module if module == "optimism" else f"stages.objectives.{module}"
    assert hasattr(importlib.import_module(place), name), row[3]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_tests_exist(row):
    file, test = row[4].strip("`").split("::")
    source = (Path(__file__).parent / file).read_text()
    assert f"def {test}(" in source, row[4]


def test_tests_named_in_prose_exist():
    prose = re.findall(r"`(test_\w+)`", PAGE)
    sources = "".join(path.read_text() for path in Path(__file__).parent.glob("test_*.py"))
    assert prose
    for test in prose:
        assert f"def {test}(" in sources, test


def test_everything_public_is_exported():
    assert sorted(stages.objectives.__all__, key=str) == sorted(
        set(stages.objectives.__all__), key=str
    )
    for name in stages.objectives.__all__:
        assert hasattr(stages.objectives, name), name


def test_objectives_import_nothing_but_torch_and_the_standard_library():
    for path in (ROOT / "stages" / "objectives").glob("*.py"):
        imported = re.findall(r"^(?:from|import) ([\w.]+)", path.read_text(), flags=re.MULTILINE)
        allowed = ("torch", "stages.objectives", *sys.stdlib_module_names)
        assert all(module.startswith(allowed) for module in imported), (path, imported)
