"""Settings of the trackers of a run, and the check that they can be used."""

from importlib.util import find_spec
from typing import Literal

from pydantic import Field

from stages.contract.errors import UserError
from stages.contract.params import Settings

Tracker = Literal["mlflow", "tensorboard", "trackio", "wandb"]
PACKAGES: dict[Tracker, str] = {
    "mlflow": "mlflow",
    "tensorboard": "tensorboardX",
    "trackio": "trackio",
    "wandb": "wandb",
}


class Tracking(Settings):
    """Trackers of the whole run (docs/operations.md). They change no result and no key."""

    report_to: tuple[Tracker, ...] = ()
    """Trackers that get the run's configuration, evaluations by iteration and training by step."""
    project: str = Field("geb", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=100)
    """Project of the run at a tracker; mlflow calls it experiment."""


def check_trackers(tracking: Tracking) -> None:
    """Refuses trackers whose packages are not installed where the orchestrator runs."""
    packages = [PACKAGES[tracker] for tracker in tracking.report_to]
    missing = [package for package in packages if find_spec(package) is None]
    if missing:
        raise UserError(
            f"tracking.report_to: {', '.join(missing)} is not installed",
            f"install it into the environment of geb: pip install {' '.join(missing)}",
        )
