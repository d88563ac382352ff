"""Arguments and options that several commands share."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from flows.commands.terminal import TerminalConsole
from flows.execution.run_record import RunRecord
from flows.pipeline.config import BEFORE_ITERATIONS, RunConfig
from flows.pipeline.loading import load_config
from flows.pipeline.placement import stage_sections
from flows.pipeline.step import Step
from stages.contract.errors import UserError
from stages.contract.stores import location_of, open_store

_WIDE_COLUMNS = 200

ConfigPath = Annotated[Path, typer.Argument(metavar="CONFIG", help="Configuration file (YAML).")]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="NAME=VALUE", help="Set one field, e.g. train.kappa=1e-3."),
]
RunName = Annotated[str, typer.Argument(metavar="RUN", help="Name of a run in the store.")]
StorePath = Annotated[
    str,
    typer.Option(
        "--store", envvar="GEB_STORE", help="The store: a folder, or s3://, gs:// or az://."
    ),
]
ConfigStore = Annotated[
    str | None,
    typer.Option(
        "--store", envvar="GEB_STORE", help="The store, in place of the one that CONFIG names."
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
RunnerName = Annotated[
    str | None,
    typer.Option("--runner", metavar="NAME", help="Where stages run: execution.runner."),
]
FromStage = Annotated[
    str | None,
    typer.Option("--from", metavar="STAGE", help="Compute this stage and all after it again."),
]
FromIteration = Annotated[
    int | None,
    typer.Option("--iteration", metavar="N", help="The iteration that --from means; 1 if unset."),
]

# Into a file or a pipe, tables keep their lines whole.
console = TerminalConsole(
    highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else _WIDE_COLUMNS
)


def configured(
    path: Path, overrides: list[str] | None, runner: str | None, store: str | None
) -> RunConfig:
    """The configuration that a command line names."""
    return load_config(path, chosen(overrides, store=store, runner=runner))


def chosen(
    overrides: list[str] | None, *, store: str | None = None, runner: str | None = None
) -> list[str]:
    """``--store`` and ``--runner`` as overrides, before those of ``--set``, which win."""
    options = [f"store={json.dumps(store)}"] if store else []
    options += [f"execution.runner={runner}"] if runner else []
    return [*options, *(overrides or ())]


def configured_run(store: str, run: str) -> RunConfig:
    """The configuration of a run that was started before, in the store as it is found now."""
    config = RunRecord.existing(open_store(store), run).config()
    return config.model_copy(update={"store": location_of(store)})


def forced_from(
    stage: str | None, iteration: int | None, iterations: int
) -> Callable[[Step], bool]:
    """Tells the steps that ``--from STAGE --iteration N`` asks to compute again.

    Args:
        stage: The stage; None for no step at all.
        iteration: Its iteration; the first if unset.
        iterations: How many the run has.

    Raises:
        UserError: The run has no such stage in that iteration.
    """
    order = list(stage_sections(RunConfig))
    if stage is None:
        if iteration is not None:
            raise UserError(
                f"--iteration {iteration} without --from",
                "name the stage to compute again: --from train",
            )
        return lambda step: False
    if stage not in order:
        raise UserError(f"--from {stage}: no such stage", f"one of: {', '.join(order)}")
    if stage in BEFORE_ITERATIONS and iteration is not None:
        raise UserError(
            f"--iteration {iteration}: {stage} runs once, before the iterations",
            "leave --iteration out",
        )
    if iteration is not None and not 1 <= iteration <= iterations:
        raise UserError(
            f"--iteration {iteration}: the run has iterations 1 to {iterations}",
            "name one of them, or raise `iterations`",
        )
    first = (0 if stage in BEFORE_ITERATIONS else iteration or 1, order.index(stage))

    def forced(step: Step) -> bool:
        # `iteration-1/evaluate/generate/0` is a part of the evaluation.
        part = next(each for each in step.name.split("/") if each in order)
        return (step.iteration, order.index(part)) >= first

    return forced


def require_folder(out: Path | None) -> None:
    """Checks the folder of ``--out`` before the work of which the files are.

    Raises:
        UserError: Something else is in its place.
    """
    if out is not None and out.exists() and not out.is_dir():
        raise UserError(f"--out {out} is no folder", "name a folder, which is made where it lacks")


def as_it_is(to: Console) -> Callable[[str], None]:
    """Prints lines on a console as they are, brackets included."""

    def print_line(line: str) -> None:
        to.print(line, markup=False)

    return print_line


def print_json(value: Any) -> None:
    """Prints a JSON document for programs to read."""
    typer.echo(json.dumps(value, indent=2, ensure_ascii=False))
