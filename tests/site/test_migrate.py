"""docs/migrating.md: settings that it names are there, and so are the options of TRL's trainer."""

import dataclasses
import inspect
import re

import pytest

from flows.pipeline.fields import run_rows
from tests.site.test_commands import ROOT

SECTIONS = re.split(r"^## ", (ROOT / "docs/migrating.md").read_text(), flags=re.MULTILINE)[1:]
OURS = re.compile(
    r"`((?:inputs|prepare|generate|score|pair|train|execution)\.[\w.]+|iterations)(?=[:`])"
)


def columns(section: str, number: int) -> list[str]:
    rows = [line for line in section.splitlines() if line.startswith("| ")]
    return [re.split(r"(?<!\\) \| ", row.strip("| "))[number] for row in rows[2:]]


@pytest.mark.parametrize("section", SECTIONS, ids=lambda text: text.splitlines()[0])
def test_settings_exist(section: str) -> None:
    names = {row.name for row in run_rows()}
    named = [name for cell in columns(section, 1) for name in OURS.findall(cell)]
    assert len(named) >= 2
    assert not set(named) - names


def test_options_of_trl_s_trainer_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    from trl.experimental.online_dpo import OnlineDPOConfig, OnlineDPOTrainer

    [section] = [section for section in SECTIONS if section.startswith("TRL: OnlineDPOTrainer")]
    names = {field.name for field in dataclasses.fields(OnlineDPOConfig)}
    names |= set(inspect.signature(OnlineDPOTrainer.__init__).parameters)
    named = [name for cell in columns(section, 0) for name in re.findall(r"`(\w+)`", cell)]
    assert len(named) > 10
    assert not set(named) - names
