"""Trial of code of the user's in its stage's environment, before the first stage."""

import json
import subprocess
import sys
import threading
from collections.abc import Container
from pathlib import Path

from flows.pipeline.config import RunConfig
from flows.pipeline.external import resolve
from flows.runners.base import supervised, time_limit
from flows.runners.local.environment import stage_environment
from stages.contract.errors import EXIT_OK, UserError
from stages.contract.events import Event, Failure, parse_event
from stages.contract.params import OwnFunction
from stages.contract.request import FileInput

# Code that loads a model may take longer; then its stage is the one to try it.
_LIMIT_SECONDS = 60.0
_GRACE_SECONDS = 2.0
TRIED: set[tuple[str, ...]] = set()
"""Code that this process has tried, by what tells it from other code; :data:`LOCK` guards it."""
LOCK = threading.Lock()


def call_on_trial(config: RunConfig, stage: str, what: str, program: list[str]) -> Event | None:
    """Runs a program in the environment of a stage; returns the last event that it told.

    Raises:
        UserError: The program says that the code cannot work, or the code ended it.
    """
    interpreter = config.execution.interpreters.get(stage, sys.executable)
    try:
        # Its supervisor ends it, and what it has started, when this process dies or hangs up.
        trial = subprocess.Popen(
            supervised(interpreter, _GRACE_SECONDS, program=program),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            errors="replace",
            env=stage_environment(in_bucket="://" in config.store),
        )
    except OSError:
        # The check of interpreters names one that is missing.
        return None
    assert trial.stdin is not None
    assert trial.stdout is not None
    with trial, time_limit(_LIMIT_SECONDS, trial.stdin.close):
        said = parse_event(trial.stdout.read())
        code = trial.wait()
    if code == EXIT_OK and said is None:
        raise UserError(
            f"the {what} was tried before the run, and ended the process that called it",
            "take os._exit, sys.exit and quit out of it",
        )
    if isinstance(said, Failure) and said.kind == "user":
        raise UserError(f"the {what} was tried before the run: {said.message}", said.remedy)
    return said


def try_own_code(config: RunConfig, stages: Container[str] = ("train", "pair")) -> None:
    """Calls the functions of the user's that stages would call, once in a process.

    Runners that start stages elsewhere have them tried there.

    Raises:
        UserError: A function cannot be loaded, fails, or returns what its stage cannot use.
    """
    if config.execution.runner != "process":
        return
    train = config.train
    pair = config.pair
    inputs = config.inputs
    if "train" in stages and train.objective == "python":
        own = train.python
        program = "stages.train.own_objective"
        _try(config, "train", "objective", program, inputs.objective_code, own)
    if "pair" in stages and pair.strategy == "python":
        program = "stages.pair.own_strategy"
        _try(config, "pair", "pair strategy", program, inputs.strategy_code, pair.python)


def _try(
    config: RunConfig, stage: str, what: str, module: str, code: str | None, own: OwnFunction
) -> None:
    source = resolve(code, "dataset") if code is not None else None
    if not isinstance(source, FileInput):
        return
    arguments = [own.function, json.dumps(own.settings)]
    interpreter = config.execution.interpreters.get(stage, sys.executable)
    with LOCK:
        name = source.digest, Path(source.location).name, module, *arguments, interpreter
        if name not in TRIED:
            call_on_trial(config, stage, what, [module, source.location, *arguments])
            TRIED.add(name)
