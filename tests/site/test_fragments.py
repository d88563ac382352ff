"""Fragments of configurations that the documentation shows are read as `geb plan` reads them."""

import re
from pathlib import Path

import pytest
import yaml

from flows.pipeline.loading import load_config
from tests.flows.loop import ROOT

PAGE = ROOT / "docs/clusters-by-example.md"
FRAGMENTS = dict(
    re.findall(r"^## ([^\n]+)\n(?:(?!^## ).)*?^```yaml\n(.*?)^```", PAGE.read_text(), re.M | re.S)
)


@pytest.mark.parametrize("title", FRAGMENTS)
def test_a_fragment_is_accepted(title: str, tmp_path: Path) -> None:
    path = tmp_path / "fragment.yaml"
    path.write_text(f"extends: {ROOT / 'configs/quickstart.yaml'}\n" + FRAGMENTS[title])
    config = load_config(path)
    said = yaml.safe_load(FRAGMENTS[title])["execution"]
    assert config.execution.runner == said["runner"]


def test_each_section_of_the_page_has_its_fragment() -> None:
    assert len(FRAGMENTS) == len(re.findall(r"^## ", PAGE.read_text(), re.M))
