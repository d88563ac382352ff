"""Hooks of mkdocs: pages from outside `docs/`, generated references, and links to source files.

The Markdown files read well in the repository as they are, and their links lead to its files.
The site rewrites them: to its own pages, or to a page that shows the file.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import reference
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
# Pages from outside `docs/`, by their names on the site.
ROOT_PAGES = {
    "index.md": "README.md",
    "contributing.md": "CONTRIBUTING.md",
    "changelog.md": "CHANGELOG.md",
    "benchmarks.md": "benchmarks/README.md",
    "data.md": "data/README.md",
}
GENERATED = {
    "reference/configuration.md": reference.configuration,
    "reference/command-line.md": reference.command_line,
    "reference/files.md": reference.files,
}
SOURCES = "source"
# Searches find pages, not the files that these link to.
_UNSEARCHED = "---\nsearch: {exclude: true}\n---\n\n"
# The theme would load it from a content network.
_SHIM = "https://unpkg.com/iframe-worker/shim"
_OWN_SHIM = "assets/javascripts/iframe-worker.js"
_LINK = re.compile(r"(?<=\]\()([^)\s:#]+)(#[^)\s]*)?(?=\))")
_LANGUAGES = {".py": "python", ".yaml": "yaml", ".sh": "bash", ".json": "json", ".toml": "toml"}


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Adds pages that the navigation does not name to its end, so that none is lost."""
    assert config.nav is not None
    named = set(_named(config.nav))
    pages = sorted(path.name for path in Path(config.docs_dir).glob("*.md"))
    if more := [name for name in pages if name not in named]:
        config.nav.append({"More": more})
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages that are not files of `docs/`."""
    for name, place in ROOT_PAGES.items():
        files.append(File.generated(config, name, content=(ROOT / place).read_text()))
    for name, make in GENERATED.items():
        files.append(File.generated(config, name, content=make()))
    shim = Path(__file__).with_name("iframe-worker.js").read_text()
    files.append(File.generated(config, _OWN_SHIM, content=shim))
    texts = {page.src_uri: page.content_string for page in files.documentation_pages()}
    targets = {target for uri, text in texts.items() for target in _targets(text, _place(uri))}
    for target in sorted(targets):
        if (name := _site_name(target)) and name.startswith(f"{SOURCES}/"):
            files.append(File.generated(config, name, content=_source_page(target)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turns links of the repository into links of the site."""
    uri = page.file.src_uri
    if uri.startswith(f"{SOURCES}/") or uri in GENERATED:
        return markdown

    def rewritten(match: re.Match[str]) -> str:
        name = _site_name(_resolved(match[1], _place(uri)))
        if name is None:
            return match[0]
        return posixpath.relpath(name, posixpath.dirname(uri) or ".") + (match[2] or "")

    return _LINK.sub(rewritten, markdown)


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """Takes the script of the search from the site itself."""
    return output.replace(_SHIM, posixpath.relpath(_OWN_SHIM, posixpath.dirname(page.url) or "."))


def on_post_template(output_content: str, template_name: str, config: MkDocsConfig) -> str:
    """As for pages; the only template with scripts, `404.html`, lies in the first page's folder."""
    return output_content.replace(_SHIM, _OWN_SHIM)


def _named(nav: Any) -> Iterator[str]:
    """Files that a navigation, or a part of one, names."""
    if isinstance(nav, str):
        yield nav
        return
    for entry in nav.values() if isinstance(nav, dict) else nav:
        yield from _named(entry)


def _targets(text: str, place: str) -> Iterator[str]:
    for match in _LINK.finditer(text):
        yield _resolved(match[1], place)


def _place(uri: str) -> str:
    """The file of the repository that a page of the site is."""
    return ROOT_PAGES.get(uri, f"docs/{uri}")


def _resolved(link: str, place: str) -> str:
    return posixpath.normpath(posixpath.join(posixpath.dirname(place), link))


def _site_name(target: str) -> str | None:
    """The site's file for a file of the repository; None where there is none."""
    for name, place in ROOT_PAGES.items():
        if target == place:
            return name
    if target.startswith("docs/"):
        return target.removeprefix("docs/")
    return f"{SOURCES}/{target}.md" if (ROOT / target).exists() else None


def _source_page(target: str) -> str:
    path = ROOT / target
    if path.is_dir():
        names = sorted(file.relative_to(path).as_posix() for file in path.rglob("*.yaml"))
        return f"{_UNSEARCHED}# {target}\n\n" + "\n".join(f"- `{name}`" for name in names) + "\n"
    language = _LANGUAGES.get(path.suffix, "text")
    return f"{_UNSEARCHED}# {path.name}\n\n`{target}`\n\n````{language}\n{path.read_text()}\n````\n"
