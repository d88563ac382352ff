"""Commands that the documentation shows are ones that the project has, with fields that exist.

They are read by the command line's own parser; nothing is executed.
"""

import re
import shlex
from pathlib import Path

import pytest
import typer

from flows.commands.cli import app
from flows.pipeline.config import RunConfig
from flows.pipeline.fields import field_rows

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
# A line of a block, indented or fenced; and a span of code, which may name a command alone.
IN_BLOCK = re.compile(r"^\s*(?:\$ )?(?:[A-Z_]+=\S+ )*(?:\S*bin/)?(geb [a-z].*)$")
IN_TEXT = re.compile(r"`(?:\$ )?(geb [a-z][^`]*)`")
FIELDS = {row.name: row for row in field_rows(RunConfig)}


def commands():
    """Place and text of every command that is shown, and whether it is one to type as it stands."""
    for page in PAGES:
        for number, line in enumerate(page.read_text().splitlines(), 1):
            block = IN_BLOCK.match(line)
            for text in [block[1]] if block else IN_TEXT.findall(line):
                for one in text.split(" · "):
                    place = f"{page.relative_to(ROOT)}:{number}"
                    yield place, one.split("  ")[0].split(" # ")[0].strip(), block is not None


def words(text):
    """Words of a command: parts in brackets given, of several choices the first."""
    plain = re.sub(r"(?<!=)\[([^\]]*)\](?!')", r"\1", text)
    plain = re.sub(r"([\w-]+)(?:\|[\w-]+)+", r"\1", plain)
    words = shlex.split(plain)
    ends = [sign for sign in ("|", ">", ";", "&&", "&") if sign in words]
    return words[: min(map(words.index, ends), default=len(words))]


def parsed(text):
    """Values of a command's options and arguments.

    Raises:
        typer.TyperException: The command does not exist, or does not take them.
    """
    command = typer.main.get_command(app)
    context, arguments = None, words(text)[1:]
    while True:
        context = command.make_context("geb", arguments, parent=context)
        if not hasattr(command, "resolve_command"):
            return dict(context.params)
        rest = [*context._protected_args, *context.args]
        if not rest and command.invoke_without_command:
            return dict(context.params)
        _, command, arguments = command.resolve_command(context, rest)


def is_field(name):
    """Existence of a field in a configuration, also below a user's names in its mappings."""
    section = name.rpartition(".")[0]
    own_names = section in FIELDS and "names and values" in FIELDS[section].kind
    return name in FIELDS or own_names or any(row.startswith(f"{name}.") for row in FIELDS)


def test_every_command_is_one_that_the_command_line_takes():
    shown = list(commands())
    assert len(shown) > 100
    for place, text, whole in shown:
        try:
            values = parsed(text)
        except Exception as error:
            lacks = "Missing parameter" in str(error) or "requires an argument" in str(error)
            assert lacks and not whole, f"{place}: {text}: {error}"
            continue
        for given in [*(values.get("overrides") or ()), *(values.get("grid") or ())]:
            assert is_field(given.partition("=")[0]), f"{place}: {text}: no field {given}"
        configuration = values.get("config")
        if isinstance(configuration, Path) and configuration.parts[0] == "configs":
            assert (ROOT / configuration).is_file(), f"{place}: {text}: no file {configuration}"


@pytest.mark.parametrize("text", ["geb runn x.yaml", "geb run x.yaml --parallel-runs 2"])
def test_a_command_that_is_not_there_is_found(text):
    with pytest.raises(Exception, match="No such"):
        parsed(text)


def test_every_target_of_make_is_in_the_makefile():
    targets = set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for page in PAGES:
        text = page.read_text()
        named = re.findall(r"(?:^ +(?:\$ )?|`)make ([a-z][a-z-]*)", text, re.MULTILINE)
        assert set(named) <= targets, f"{page.name}: {sorted(set(named) - targets)}"
