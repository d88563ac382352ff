"""The documentation builds into one site, and its links, references and scripts are its own."""

import os
import re
import shutil
import sys
from pathlib import Path
from urllib.parse import quote, urlsplit

import pytest

from flows.pipeline.fields import run_rows
from stages.tables.schemas import SCHEMAS
from tests.flows.standing.browser import browser_page
from tests.programs import run_program

ROOT = Path(__file__).parents[2]
# What people look for, and the page that answers it.
ANSWERS = {
    "resume": "concepts",
    "out of memory": "troubleshooting",
    "8 GPUs": "training",
    "reward model": "oracles",
    "Llama": "training",
    "wandb": "operations",
    "schedule": "operations",
    "kappa": "training",
    "exploration": "equations",
}


def build(site, configuration=ROOT / "mkdocs.yml"):
    return run_program(
        *(sys.executable, "-m", "mkdocs", "build", "--strict"),
        *("--site-dir", site, "--config-file", configuration),
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "NO_MKDOCS_2_WARNING": "1"},
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    built = build(folder)
    assert built.returncode == 0, built.stderr
    assert "WARNING" not in built.stderr
    return folder


def test_every_page_is_shown_without_a_network(site):
    pages = sorted(site.rglob("*.html"))
    assert len(pages) > 20
    loaded = re.compile(r"<(?:script|link|img)[^>]*(?:src|href)=\"?(https?:[^\" >]+)")
    assert {address for page in pages for address in loaded.findall(page.read_text())} == set()


def test_the_reference_has_every_field_command_and_column(site):
    shown = (site / "reference/configuration.html").read_text().replace("<wbr>", "")
    for row in run_rows():
        assert f"<code>{row.name}</code>" in shown, row.name
    assert "<code>generate.shard_index</code>" not in shown
    assert "<code>&lt;|im_end|&gt;</code>" in shown
    assert "<code>train.target_ratio</code></td>\n<td><code>null</code></td>" in shown
    commands = (site / "reference/command-line.html").read_text()
    assert all(f"<code>{word}" in commands for word in ("--set NAME=VALUE", "CONFIG"))
    tables = (site / "reference/files.html").read_text()
    assert all(f"<code>{name}</code>" in tables for name in SCHEMAS["pairs"].names)


@pytest.mark.slow
@pytest.mark.browser
def test_the_first_hit_of_a_search_answers_it(site):
    hits = {}
    with browser_page() as page:
        for query in ANSWERS:
            page.goto(f"{(site / 'index.html').as_uri()}?q={quote(query)}")
            first = page.locator(".md-search-result__link").first
            hits[query] = Path(urlsplit(first.get_attribute("href") or "").path).stem
    assert hits == ANSWERS


def test_a_link_to_nowhere_fails_the_build(tmp_path):
    docs = tmp_path / "docs"
    shutil.copytree(ROOT / "docs", docs)
    page = docs / "clusters.md"
    page.write_text(page.read_text() + "\n[lost](../flows/nowhere.py)\n")
    (docs / "new.md").write_text("# A page that the navigation does not name\n")
    configuration = tmp_path / "mkdocs.yml"
    settings = (ROOT / "mkdocs.yml").read_text()
    hook = ROOT / "scripts/site/hooks.py"
    configuration.write_text(settings.replace("scripts/site/hooks.py", str(hook)))
    built = build(tmp_path / "site", configuration)
    assert built.returncode != 0
    assert "../flows/nowhere.py" in built.stderr
    assert "new.md" not in built.stderr


def test_the_troubleshooting_page_has_the_code_s_messages():
    page = (ROOT / "docs/troubleshooting.md").read_text()
    code = "\n".join(
        path.read_text()
        for room in ("flows", "stages", "experiments")
        for path in (ROOT / room).rglob("*.py")
    )
    # Strings that go over several lines.
    joined = re.sub(r'"\s*\n\s*f?"', "", code)
    messages = re.findall(r"^### `(.*)`$", page, re.MULTILINE)
    assert len(messages) > 10
    for part in (part for message in messages for part in re.split(r" ?… ?", message)):
        assert part in joined, part
