"""Fragments of configurations that the documentation shows are read as `geb plan` reads them."""

import re
from pathlib import Path

import pytest
import yaml

from flows.pipeline.loading import load_config
from tests.flows.loop import ROOT

PAGE = ROOT / "docs/clusters.md"
FRAGMENTS = dict(
    re.findall(
        r"^### ([^\n]+)\n(?:(?!^###? ).)*?^```yaml\n(.*?)^```", PAGE.read_text(), re.M | re.S
    )
)


@pytest.mark.parametrize("title", FRAGMENTS)
def test_a_fragment_is_accepted(title: str, tmp_path: Path) -> None:
    path = tmp_path / "fragment.yaml"
    path.write_text(f"extends: {ROOT / 'configs/quickstart.yaml'}\n" + FRAGMENTS[title])
    config = load_config(path)
    runner = yaml.safe_load(FRAGMENTS[title])["execution"]["runner"]
    assert config.execution.runner == runner


def test_every_fragment_of_the_page_is_read() -> None:
    assert len(FRAGMENTS) == PAGE.read_text().count("```yaml\n")
