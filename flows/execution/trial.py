"""Trial of custom functions in the environments of their stages, before the first stage."""

import itertools
import json
import subprocess
import sys
from collections.abc import Container
from functools import cache
from pathlib import Path
from typing import Any

from flows.pipeline.config import RunConfig
from flows.pipeline.external import resolve
from flows.runners.command_lines import stage_environment, supervised
from stages.contract.data_files import files_of_folder, read_data_file
from stages.contract.errors import EXIT_OK, EXIT_OVERDUE, UserError
from stages.contract.events import Failure, parse_event
from stages.contract.request import FileInput
from stages.prepare.prompts import read_prompt

# Code that loads a model may take longer; then its stage is the one to try it.
_LIMIT_SECONDS = 60.0
_GRACE_SECONDS = 2.0
_PROMPTS = 2


def try_own_code(
    config: RunConfig, stages: Container[str] = frozenset({"score", "pair", "train"})
) -> None:
    """Calls the custom functions that stages of a run and its suites would call, in a process each.

    Runners that start stages elsewhere have them tried there, and a function that takes too long is
    left to its stage.

    Raises:
        UserError: A function cannot be loaded, fails, or returns what its stage cannot use.
    """
    if config.execution.runner != "process":
        return
    inputs = config.inputs
    trials = []
    for part in config.parts().values():
        code = part.inputs.oracle_code
        if "python" in part.score.parts:
            trials.append((part, "score", "oracle", "stages.score.python_function", code))
    code = inputs.objective_code
    if config.train.objective == "python":
        trials.append((config, "train", "objective", "stages.train.own_objective", code))
    code = inputs.strategy_code
    if config.pair.strategy == "python":
        trials.append((config, "pair", "pair strategy", "stages.pair.own_strategy", code))
    for part, stage, noun, module, code in trials:
        source = resolve(code, "dataset") if code and stage in stages else None
        if isinstance(source, FileInput):
            python = getattr(part, stage).python
            # A suite that names no prompts scores the run's.
            prompts = _first_prompts(part if part.inputs.test_prompts else config)
            example = prompts if stage == "score" else python.settings
            _call(
                config.execution.interpreters.get(stage, sys.executable),
                noun,
                (module, source.location, python.function, json.dumps(example)),
                source.digest,
                in_bucket="://" in config.store,
            )


@cache
def _call(
    interpreter: str, noun: str, arguments: tuple[str, ...], digest: str, *, in_bucket: bool
) -> None:
    """Tries a function in the environment of a stage; ``digest`` tells versions of its file apart.

    Raises:
        UserError: The function cannot work, or ended its process.
    """
    program = ["stages.harness.user_code", *arguments]
    limit = ["--limit", str(_LIMIT_SECONDS)]
    try:
        # Its supervisor ends it, and what it has started, when this process dies or hangs up.
        trial = subprocess.Popen(
            supervised(interpreter, _GRACE_SECONDS, *limit, program=program),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            errors="replace",
            env=stage_environment(in_bucket=in_bucket),
        )
    except OSError:
        # The prompts are longer than a command line may be: the stage itself tries the function.
        return
    assert trial.stdout is not None
    with trial:
        event = parse_event(trial.stdout.read())
        code = trial.wait()
    if code == EXIT_OVERDUE:
        return
    # The number of a signal is added to 128.
    if event is None and (code == EXIT_OK or code > 128):
        raise UserError(
            f"the {noun} was tried before the run, and ended its process with exit code {code}",
            "take os._exit, sys.exit and quit out of it; 137 is a kill (memory ran out, for "
            "example), 139 a crash of a library",
        )
    if isinstance(event, Failure) and event.kind == "user":
        raise UserError(f"the {noun} was tried before the run: {event.message}", event.remedy)


def _first_prompts(config: RunConfig) -> list[dict[str, Any]]:
    """The run's first prompts with their reference answers; none if they cannot be read here."""
    inputs = config.inputs
    path = Path([*inputs.prompts, inputs.test_prompts or ""][0]).expanduser()
    files = files_of_folder(path) if path.is_dir() else [path]
    if not files or not files[0].is_file():
        return []
    try:
        first_rows = itertools.islice(read_data_file(files[0]), _PROMPTS)
        prompts = [read_prompt(row, config.prepare, ()) for _, row in first_rows]
    except UserError:
        # The stage `prepare` reports what is wrong with them.
        return []
    return [
        {"messages": prompt.messages, "reference_answer": prompt.reference} for prompt in prompts
    ]
