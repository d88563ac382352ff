"""docs/equations.md, the registry and the tests name the same things."""

import importlib
import re
from pathlib import Path

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


@pytest.mark.parametrize(
    ("heading", "registry"),
    [
        ("Exploration bonuses", DESIGNS),
        ("Divergences", DIVERGENCES),
        ("Losses and conditions", [name for name in LOSSES if name != "sigmoid"]),
    ],
)
def test_the_page_names_what_the_registry_has(heading, registry):
    names = [row[0].strip("`") for row in TABLES[heading] if row[0].startswith("`")]
    assert names == list(registry)


def test_functions_and_tests_of_each_row_exist():
    for rows in TABLES.values():
        for *_, function, test in rows:
            module, name = function.strip("`").split(".")
            # The conditions of the theorems are helpers of the tests.
            place = module if module == "test_optimism" else f"stages.objectives.{module}"
            assert hasattr(importlib.import_module(place), name), function
            file, test_name = test.strip("`").split("::")
            assert f"def {test_name}(" in (Path(__file__).parent / file).read_text(), test
