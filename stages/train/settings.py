"""Objective and κ made of the stage's parameters, and checked."""

from __future__ import annotations

from stages.contract.errors import UserError
from stages.objectives import KappaController, KappaSchedule, ObjectiveSettings
from stages.train.params import ObjectiveParams, TrainParams


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
    """Controller of κ over the steps.

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
