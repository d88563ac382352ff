"""κ schedules and the calibration to a target ratio."""

import json
import math

import pytest

from stages.objectives import KappaController, KappaSchedule


def kappas(schedule, num_steps=5):
    return [schedule.at(step=step, num_steps=num_steps) for step in range(num_steps)]


def test_constant():
    assert kappas(KappaSchedule(0.3)) == [0.3] * 5


def test_linear_decays_to_the_final_fraction():
    assert kappas(KappaSchedule(1.0, "linear", final_fraction=0.2)) == pytest.approx(
        [1.0, 0.8, 0.6, 0.4, 0.2]
    )


def test_cosine_decays_slowly_at_both_ends():
    values = kappas(KappaSchedule(2.0, "cosine"))
    assert values == pytest.approx([2.0, 1 + math.sqrt(0.5), 1.0, 1 - math.sqrt(0.5), 0.0])


def test_per_iteration_keeps_the_last_value():
    schedule = KappaSchedule(kind="per_iteration", values=(1.0, 0.1))
    found = [schedule.at(step=3, num_steps=5, iteration=t) for t in (1, 2, 3)]
    assert found == [1.0, 0.1, 0.1]


def test_one_step_starts_undecayed():
    assert kappas(KappaSchedule(1.0, "linear"), num_steps=1) == [1.0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"kappa": -1.0}, "not negative, got -1.0"),
        ({"kappa": float("inf")}, "finite"),
        ({"kind": "step"}, "kappa schedule 'step' is unknown"),
        ({"final_fraction": 2.0}, "final_fraction"),
        ({"kind": "per_iteration"}, "at least one"),
        ({"values": (1.0,)}, "values belong to 'per_iteration'"),
        ({"kind": "per_iteration", "values": (1.0, -1.0)}, "not negative"),
    ],
)
def test_refused_schedules(arguments, message):
    with pytest.raises(ValueError, match=message):
        KappaSchedule(**arguments)


@pytest.mark.parametrize("where", [{"step": 5}, {"step": -1}, {"step": 0, "iteration": 0}])
def test_steps_outside_the_schedule_are_refused(where):
    with pytest.raises(
        ValueError, match=r"in iteration \d: steps count from 0, iterations from 1$"
    ):
        KappaSchedule().at(**({"num_steps": 5} | where))


def test_without_target_the_schedule_rules():
    controller = KappaController(KappaSchedule(0.7))
    controller.observe(abs_loss_sum=3.0, abs_bonus_sum=0.0)
    assert not controller.calibrating
    assert controller.kappa(step=0, num_steps=1) == 0.7


def test_calibration_meets_the_target_over_the_first_batches():
    controller = KappaController(KappaSchedule(), target_ratio=1e-2, calibration_batches=2)
    controller.observe(abs_loss_sum=0.6, abs_bonus_sum=2.0)
    assert controller.kappa(step=0, num_steps=9) == pytest.approx(1e-2 * 0.6 / 2.0)
    assert controller.calibrating
    controller.observe(abs_loss_sum=0.4, abs_bonus_sum=8.0)
    kappa = controller.kappa(step=1, num_steps=9)
    assert kappa * (2.0 + 8.0) / (0.6 + 0.4) == pytest.approx(1e-2)
    assert not controller.calibrating
    controller.observe(abs_loss_sum=100.0, abs_bonus_sum=1.0)
    assert controller.kappa(step=2, num_steps=9) == kappa


def test_schedule_multiplies_the_calibrated_kappa():
    controller = KappaController(KappaSchedule(1.0, "linear"), target_ratio=0.5)
    controller.observe(abs_loss_sum=2.0, abs_bonus_sum=1.0)
    assert controller.kappa(step=0, num_steps=3) == pytest.approx(1.0)
    assert controller.kappa(step=1, num_steps=3) == pytest.approx(0.5)


def test_a_resumed_run_goes_on_with_the_same_kappa():
    def fresh():
        return KappaController(KappaSchedule(), target_ratio=0.1, calibration_batches=3)

    batches = [(0.7, 3.0), (0.5, 4.0), (0.6, 1.0), (9.0, 9.0)]
    whole = fresh()
    for loss, bonus in batches:
        whole.observe(abs_loss_sum=loss, abs_bonus_sum=bonus)
    first = fresh()
    for loss, bonus in batches[:2]:
        first.observe(abs_loss_sum=loss, abs_bonus_sum=bonus)
    resumed = fresh()
    resumed.load_state_dict(json.loads(json.dumps(first.state_dict())))
    for loss, bonus in batches[2:]:
        resumed.observe(abs_loss_sum=loss, abs_bonus_sum=bonus)
    assert resumed.kappa(step=0, num_steps=1) == whole.kappa(step=0, num_steps=1)
    assert resumed.state_dict() == whole.state_dict()


@pytest.mark.parametrize("sums", [(1.0, 0.0), (1.0, float("nan")), (float("inf"), 1.0)])
def test_a_target_that_cannot_be_met_is_an_error(sums):
    controller = KappaController(KappaSchedule(), target_ratio=0.1)
    with pytest.raises(ValueError, match="cannot be met"):
        controller.observe(abs_loss_sum=sums[0], abs_bonus_sum=sums[1])


def test_batches_of_ties_alone_leave_no_kappa():
    """It would be 0, and the bonus, of which alone ties are trained, off for the iteration."""
    controller = KappaController(KappaSchedule(), target_ratio=0.1, calibration_batches=2)
    controller.observe(abs_loss_sum=0.0, abs_bonus_sum=3.0)
    with pytest.raises(ValueError, match=r"first 2 batches .* all their pairs are ties"):
        controller.observe(abs_loss_sum=0.0, abs_bonus_sum=3.0)


def test_kappa_before_the_first_batch_is_an_error():
    controller = KappaController(KappaSchedule(), target_ratio=0.1)
    with pytest.raises(ValueError, match="one observed batch"):
        controller.kappa(step=0, num_steps=1)


@pytest.mark.parametrize("arguments", [{"target_ratio": 0.0}, {"calibration_batches": 0}])
def test_refused_calibrations(arguments):
    with pytest.raises(ValueError, match="must be"):
        KappaController(KappaSchedule(), **arguments)


def test_two_steps_decay_from_the_start_to_the_end():
    assert kappas(KappaSchedule(2.0, "linear"), num_steps=2) == [2.0, 0.0]


@pytest.mark.parametrize("kind", ["linear", "cosine"])
def test_a_final_fraction_of_one_is_no_decay(kind):
    assert kappas(KappaSchedule(0.5, kind, final_fraction=1.0)) == pytest.approx([0.5] * 5)


def test_kappa_may_be_zero():
    assert KappaSchedule(0.0).at(step=0, num_steps=1) == 0.0


def test_the_iteration_counts_from_one_and_reaches_the_schedule():
    schedule = KappaSchedule(kind="per_iteration", values=(1.0, 0.1))
    assert schedule.at(step=0, num_steps=1) == 1.0
    controller = KappaController(schedule)
    assert controller.kappa(step=0, num_steps=1) == 1.0
    assert controller.kappa(step=0, num_steps=1, iteration=2) == 0.1


def test_one_batch_is_enough_to_calibrate():
    controller = KappaController(KappaSchedule(), target_ratio=0.5, calibration_batches=1)
    controller.observe(abs_loss_sum=4.0, abs_bonus_sum=2.0)
    assert not controller.calibrating
    assert controller.kappa(step=0, num_steps=1) == 1.0
