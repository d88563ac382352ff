"""The verdict of a report, and what stands around it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from flows.execution.run_record import RunRecord
from flows.pipeline.config import RunConfig
from flows.report.html import write
from flows.report.summary import Summary
from flows.report.verdict import verdict
from stages.contract.local_store import LocalStore
from tests.flows.evaluations import artifact_in


def summary(folder: Path, *, promoted: bool | None) -> Summary:
    """One iteration with 0.9 wins; its gates passed, failed, or were not asked yet."""
    artifacts: dict[str, Any] = {}
    if promoted is not None:
        gate = {"gate": "min_win_rate", "passed": promoted, "reason": "the win rate is 0.9"}
        decision = {"promoted": promoted, "aliases": ["production"], "gates": [gate]}
        (folder / "decision.json").write_text(json.dumps(decision))
        artifacts["iteration-1/promote"] = artifact_in(folder)
    rows = [
        {"iteration": 0, "mean_reward": 0.5, "components": {}},
        {
            "iteration": 1,
            "mean_reward": 0.75,
            "win_rate": 0.9,
            "tied_prompts": 3,
            "components": {},
            "intervals": {"win_rate": (0.85, 0.95), "mean_reward": (0.7, 0.8)},
        },
    ]
    config = RunConfig(iterations=1, train={"beta": 0.5})
    return Summary("small", config, "store", artifacts=artifacts, rows=rows)


@pytest.mark.parametrize(
    ("promoted", "tone", "end"),
    [
        (True, "good", "It passed every gate and was promoted to production."),
        (False, "bad", "It was not promoted."),
        (None, "open", "the base's 0.500."),
    ],
)
def test_the_verdict_is_one_sentence_with_its_interval(
    tmp_path: Path, promoted: bool | None, tone: str, end: str
) -> None:
    found = verdict(summary(tmp_path, promoted=promoted))
    assert found.tone == tone
    assert found.sentence.startswith(
        "After 1 iteration the model scores above its base on 90.0 % (95 % interval 85.0 to "
        "95.0 %) of the held-out prompts (3 tie); its mean reward is 0.750 [0.700, 0.800]"
    )
    assert found.sentence.endswith(end)
    assert found.reasons == (("the win rate is 0.9",) if promoted is False else ())


def test_a_run_that_has_evaluated_nothing_says_so(tmp_path: Path) -> None:
    found = summary(tmp_path, promoted=None)
    found.rows[1] = {"iteration": 1, "components": {}}
    assert verdict(found).sentence == "No iteration has been evaluated yet."


def test_the_page_lists_the_settings_that_differ_and_needs_no_network(
    tmp_path: Path,
) -> None:
    found = summary(tmp_path, promoted=None)
    for row in found.rows:
        row |= {"solved": {}}
    record = RunRecord(LocalStore.open(str(tmp_path / "store"), create=True), "small")
    record.save_config(found.config)
    page = Path(write(record, found, [])).read_text()
    assert 'train.beta</code></td><td class="text"><code>0.5</code>' in page
    assert "train.epochs" not in page.split("Every setting")[0]
    assert "https://" not in page.replace("https://…", ""), "no network"
