"""Parameters turned into what the mathematics and the trackers want, checked on the way."""

from __future__ import annotations

from collections.abc import Sequence

from stages.contract.errors import UserError
from stages.objectives import KappaController, KappaSchedule, ObjectiveSettings
from stages.train.params import ObjectiveParams, TrainParams


def check_trackers(names: Sequence[str]) -> None:
    """Checks that each tracker is one that the Trainer knows and that its package is installed.

    Raises:
        UserError: It is not.
    """
    if not names:
        return
    from transformers.integrations import get_available_reporting_integrations

    available = get_available_reporting_integrations()
    missing = [name for name in names if name not in available]
    if missing:
        raise UserError(
            f"report_to: {', '.join(missing)} cannot be used here; available are "
            f"{', '.join(available) or 'none'}",
            "install the tracker's package in the environment of the train stage, or unset "
            "train.report_to",
        )


def objective_settings(params: ObjectiveParams) -> ObjectiveSettings:
    """The objective, checked.

    Raises:
        UserError: The combination is not defined.
    """
    chosen = {name: getattr(params, name) for name in ObjectiveParams.model_fields}
    try:
        return ObjectiveSettings(**chosen)
    except ValueError as error:
        raise UserError(f"the objective: {error}", "choose another combination") from error


def kappa_controller(params: TrainParams) -> KappaController:
    """What gives κ of each step.

    Raises:
        UserError: The schedule is not defined.
    """
    try:
        schedule = KappaSchedule(
            kappa=params.kappa_or_default(),
            kind=params.kappa_schedule,
            final_fraction=params.kappa_final_fraction,
            values=params.kappa_values,
        )
        return KappaController(
            schedule,
            # f-DPO has no bonus that could be weighed.
            target_ratio=None if params.design == "none" else params.target_ratio,
            calibration_batches=params.calibration_batches,
        )
    except ValueError as error:
        raise UserError(f"kappa: {error}", "correct the value") from error
