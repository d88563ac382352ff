"""The rehearsal of the paper's table: the presets, with models and data of a hub on loopback."""

import json
import sys
from collections import defaultdict
from pathlib import Path
from subprocess import run

import pytest

from benchmarks.rehearsal import TITLE
from experiments.paper.tables import paper_rows, published


@pytest.mark.slow
@pytest.mark.release
@pytest.mark.timeout(7200)
def test_every_row_and_published_figure_is_in_a_table(tmp_path):
    rehearse = [sys.executable, "-m", "benchmarks.rehearsal", "--json", "--store", tmp_path]
    done = run(rehearse, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["failed"] == {}
    assert document["title"] == TITLE
    expected = defaultdict(list)
    for row in paper_rows("full"):
        if row.seeds:
            expected[f"{row.setting}: {row.experiment}"].append((row.method, row.divergence))
    shown = {
        table["title"]: {(row["method"], row["divergence"]): row for row in table["rows"]}
        for table in document["tables"]
    }
    assert {title: list(rows) for title, rows in shown.items()} == expected
    for experiment, setting, method, divergence, column in published():
        cell = shown[f"{setting}: {experiment}"][method, divergence][column]
        assert not cell.startswith("-"), (setting, experiment, method, divergence, column)
    drawn = {path.stem for path in Path(document["page"]).parent.glob("*.png")}
    curves = {
        f"kappa-{row.setting}-{row.divergence}".replace(" ", "-").lower()
        for row in paper_rows("full")
        if row.experiment == "kappa"
    }
    assert drawn == curves
