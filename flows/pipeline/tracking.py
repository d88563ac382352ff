"""Settings of the trackers of a run, and the check that they can be used."""

import functools
import subprocess
import sys
from typing import Literal

from pydantic import Field

from stages.contract.errors import UserError
from stages.contract.params import Settings

TRACKERS = "trackers"
"""Environment of the trackers' packages in `execution.interpreters`."""

Tracker = Literal["mlflow", "tensorboard", "trackio", "wandb"]
# The others' packages have their names.
_PACKAGES = {"tensorboard": "tensorboardX"}
# The packages of its arguments that it does not find.
_LOOK = """
from importlib.util import find_spec; from sys import argv
print(*[each for each in argv[1:] if find_spec(each) is None])
"""


class Tracking(Settings):
    """Trackers of the whole run (docs/tracking.md). They change no result and no key."""

    report_to: tuple[Tracker, ...] = ()
    """Trackers that get one session each for the run: metrics of evaluation, generation and reward
    by iteration, training by step, and the registered model."""
    project: str = Field("geb", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=100)
    """Project of the sessions; mlflow calls it experiment."""


def check_trackers(tracking: Tracking, interpreter: str | None) -> None:
    """Refuses trackers whose packages are not in an interpreter, this one if none is named."""
    if not tracking.report_to:
        return
    python = interpreter or sys.executable
    missing = _missing(python, tuple(_PACKAGES.get(each, each) for each in tracking.report_to))
    if missing:
        raise UserError(
            f"tracking.report_to: no {', '.join(missing)} in the environment of {python}",
            "install it there, or run `make setup-trackers` and set execution.interpreters."
            "trackers to its .venv-trackers/bin/python",
        )


@functools.cache
def _missing(python: str, packages: tuple[str, ...]) -> list[str]:
    # -P: a folder of a tracker's name may be here.
    command = [python, "-P", "-c", _LOOK, *packages]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        said = getattr(error, "stderr", None) or str(error)
        raise UserError(
            f"no Python interpreter at {python} for trackers: {said.strip()}",
            "run `make setup-trackers`, or correct execution.interpreters.trackers",
        ) from error
    return done.stdout.split()
