"""Generated pages of the documentation: configuration, command line and file formats."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Sequence
from itertools import groupby

import typer

from flows.commands.cli import app
from flows.pipeline.config import RunConfig, StageResources
from flows.pipeline.fields import FieldRow, run_rows
from flows.report.table import FittedTable
from stages.contract.params import StageParams
from stages.tables.schemas import TABLES

_RUN = "Run"


def configuration() -> str:
    """Every field of a run's configuration, section by section."""
    parts = [
        "# Configuration",
        "A configuration file is YAML with these fields; what it leaves out has the default. "
        "`--set NAME=VALUE` sets one on the command line. An unknown name is refused. "
        "`geb fields PREFIX` prints this table in a terminal, `--json` for programs.",
        "A field marked *speed* changes speed or place alone: results computed before it was "
        "changed are still used. Sections `resources`, `execution` and `estimation` are so "
        "throughout.",
    ]
    for section, rows in groupby(run_rows(), key=_section):
        parts.append(f"## {section}")
        if section != _RUN:
            parts.append(RunConfig.model_fields[section].description or "")
        if section == "resources":
            parts.append(
                f"STAGE is one of {', '.join(f'`{s}`' for s in StageResources.model_fields)}."
            )
        parts.append(_table(("field", "default", "values", "meaning"), map(_cells, rows)))
    return "\n\n".join(parts) + "\n"


def command_line() -> str:
    """Every command with its arguments and options."""
    group = typer.main.get_command(app)
    parts = [
        "# Command line",
        "Exit code 0 means that the work is done, 64 that something given is wrong (the message "
        "names it and the remedy), 130 that Ctrl-C ended it, anything else that a retry may help. "
        "`geb --install-completion` sets up completion for the shell.",
        *_commands(group, "geb"),
    ]
    return "\n\n".join(parts) + "\n"


def files() -> str:
    """Tables with their columns, and the files of each stage's artifact."""
    parts = [
        "# Files",
        "Tables are Parquet files. Their columns are checked when a stage opens them. "
        "Log-probabilities are natural logarithms.",
    ]
    for table, columns in TABLES.items():
        rows = [
            (f"`{name}`", f"`{kind}`", "may be null" if optional else "", meaning)
            for name, (kind, meaning, optional) in columns.items()
        ]
        parts += [f"## {table}", _table(("column", "type", "", "meaning"), rows)]
    parts.append("## Artifacts")
    parts.append(
        "Files that each stage writes; all artifacts have `manifest.json`, with key, parameters, "
        "inputs, software, and size and digest of every file."
    )
    rows = [
        (f"`{stage}`", f"`{path}`", output.kind, "optional" if output.optional else "")
        for stage, field in RunConfig.model_fields.items()
        if isinstance(field.annotation, type) and issubclass(field.annotation, StageParams)
        for path, output in field.annotation.outputs.items()
    ]
    parts.append(_table(("stage", "file", "kind", ""), rows))
    return "\n\n".join(parts) + "\n"


def _section(row: FieldRow) -> str:
    section, dot, _ = row.name.partition(".")
    return section if dot or section == "suites" else _RUN


def _cells(row: FieldRow) -> tuple[str, ...]:
    default = "required" if row.default is None else f"`{row.default}`"
    speed = " *speed*" if row.speed_only else ""
    # A browser breaks a long name after a dot.
    name = html.escape(row.name).replace(".", ".<wbr>")
    return f"<code>{name}</code>", default, row.kind, f"{row.meaning}{speed}"


def _commands(group: typer.core.TyperGroup, prefix: str) -> Iterable[str]:
    context = typer.Context(group, info_name=prefix)
    for name, command in group.commands.items():
        called = f"{prefix} {name}"
        yield f"## {called}" if prefix == "geb" else f"### {called}"
        yield _paragraphs(command.help or "")
        if isinstance(command, typer.core.TyperGroup):
            yield from _commands(command, called)
            continue
        subcontext = typer.Context(command, info_name=name, parent=context)
        usage = " ".join(command.collect_usage_pieces(subcontext))
        yield f"    {called} {usage}"
        records = [param.get_help_record(subcontext) for param in command.get_params(subcontext)]
        rows = [(f"`{names}`", text) for names, text in filter(None, records)]
        yield _table(("argument or option", "meaning"), rows)


def _paragraphs(text: str) -> str:
    return "\n\n".join(" ".join(part.split()) for part in text.split("\n\n"))


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    table = FittedTable("", header, list(rows)).markdown()
    # Code shows an escaped bar as it is written; a bar within it ends no cell.
    table = re.sub("`[^`]*`", lambda code: html.unescape(code[0]), table)
    # Descriptions name pages as a terminal shows them.
    return re.sub(r"docs/([a-z-]+\.md)", r"[\1](../\1)", table)
