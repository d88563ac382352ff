"""docs/equations.md, the registry, the golden rows and the tests name the same things."""

import importlib
import json
import re
from pathlib import Path

import golden
import pytest

from stages.objectives.designs import DESIGNS
from stages.objectives.divergences import DIVERGENCES
from stages.objectives.losses import LOSSES

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "equations.md").read_text()
COLUMNS = ["symbol", "equation", "paper reference", "function", "test"]


def tables(page):
    """{heading: rows} of the tables with the five columns."""
    rows = {}
    for section in re.split(r"^## ", page, flags=re.MULTILINE)[1:]:
        heading, *lines = section.splitlines()
        cells = [
            [c.strip() for c in re.split(r"(?<!\\)\|", line)[1:-1]]
            for line in lines
            if line.startswith("|")
        ]
        if cells and cells[0] == COLUMNS:
            rows[heading] = cells[2:]
    return rows


TABLES = tables(PAGE)
ROWS = [row for rows in TABLES.values() for row in rows]


def names(heading):
    return [row[0].strip("`") for row in TABLES[heading] if row[0].startswith("`")]


def test_designs_agree():
    in_golden = {case["design"] for case in json.loads(golden.GOLDEN_FILE.read_text())["bonus"]}
    assert names("Exploration bonuses") == list(DESIGNS)
    assert in_golden == set(DESIGNS)
    assert list(golden.BONUSES) == list(DESIGNS)


def test_divergences_agree():
    in_golden = {c["divergence"] for c in json.loads(golden.GOLDEN_FILE.read_text())["reward"]}
    assert names("Divergences") == list(DIVERGENCES)
    assert in_golden >= set(DIVERGENCES)


def test_losses_agree():
    assert ["sigmoid", *names("Losses and conditions")] == list(LOSSES)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_functions_exist(row):
    module, name = row[3].strip("`").split(".")
    # The conditions of the theorems are helpers of the tests.
    place = module if module == "test_optimism" else f"stages.objectives.{module}"
    assert hasattr(importlib.import_module(place), name), row[3]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_tests_exist(row):
    file, test = row[4].strip("`").split("::")
    source = (Path(__file__).parent / file).read_text()
    assert f"def {test}(" in source, row[4]
