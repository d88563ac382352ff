"""Settings of the trackers of a run, and the check that they can be used."""

from __future__ import annotations

import functools
import importlib.util
import shutil
import subprocess
import sys
from typing import Literal

from pydantic import Field

from stages.contract.errors import UserError
from stages.contract.params import Settings

TRACKERS = "trackers"
"""Environment of the trackers' packages in `execution.interpreters`."""

Tracker = Literal["mlflow", "tensorboard", "trackio", "wandb"]
_PACKAGES: dict[Tracker, str] = {
    "mlflow": "mlflow",
    "tensorboard": "tensorboardX",
    "trackio": "trackio",
    "wandb": "wandb",
}


class Tracking(Settings):
    """Trackers of the whole run (docs/tracking.md). They change no result and no key."""

    report_to: tuple[Tracker, ...] = ()
    """Trackers that get one session each for the run: metrics of evaluation, generation and reward
    by iteration, training by step, and the registered model. `train.report_to` is another thing:
    live curves of the train stage alone, in a session for each training."""
    project: str = Field("geb", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=100)
    """Project of the sessions; mlflow calls it experiment."""


def check_trackers(tracking: Tracking, interpreter: str | None) -> None:
    """Checks that the packages of the trackers are there.

    Args:
        tracking: Trackers of a run.
        interpreter: Python that has the packages; None stands for this one.

    Raises:
        UserError: The interpreter or a package is missing.
    """
    if not tracking.report_to:
        return
    if interpreter is not None and shutil.which(interpreter) is None:
        raise UserError(
            f"no Python interpreter at {interpreter} for trackers",
            "run `make setup-trackers`, or correct execution.interpreters.trackers",
        )
    names = tuple(_PACKAGES[each] for each in tracking.report_to)
    missing = [each for each in names if each not in _installed(interpreter, names)]
    if missing:
        raise UserError(
            f"tracking.report_to: no {', '.join(missing)} in the environment of "
            f"{interpreter or sys.executable}",
            "install it there, or run `make setup-trackers` and set execution.interpreters."
            "trackers to its .venv-trackers/bin/python",
        )


@functools.cache
def _installed(interpreter: str | None, names: tuple[str, ...]) -> set[str]:
    """Those of some packages that an interpreter finds."""
    if interpreter is None:
        return {name for name in names if importlib.util.find_spec(name) is not None}
    program = (
        "import importlib.util, sys\n"
        "print(*[name for name in sys.argv[1:] if importlib.util.find_spec(name)])"
    )
    done = subprocess.run(
        [interpreter, "-c", program, *names], capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise UserError(
            f"execution.interpreters.trackers: {interpreter} does not run: {done.stderr.strip()}",
            "name the Python of an environment that has the trackers",
        )
    return set(done.stdout.split())
