"""κ, and its calibration to a target ratio."""

import json

import pytest

from stages.objectives.kappa import KappaController
from stages.objectives.params import KappaParams


def controller_of(**settings):
    return KappaController(KappaParams(**settings))


def test_without_target_kappa_stays():
    controller = controller_of(kappa=0.7)
    controller.observe(abs_loss_sum=3.0, abs_bonus_sum=0.0)
    assert not controller.calibrating
    assert controller.kappa() == 0.7


@pytest.fixture
def two_batches(monkeypatch):
    """Two batches calibrate κ."""
    monkeypatch.setattr("stages.objectives.kappa.CALIBRATION_BATCHES", 2)


def test_calibration_meets_the_target_over_the_first_batches(two_batches):
    controller = controller_of(target_ratio=1e-2)
    controller.observe(abs_loss_sum=0.6, abs_bonus_sum=2.0)
    assert controller.kappa() == pytest.approx(1e-2 * 0.6 / 2.0)
    assert controller.calibrating
    controller.observe(abs_loss_sum=0.4, abs_bonus_sum=8.0)
    kappa = controller.kappa()
    assert kappa * (2.0 + 8.0) / (0.6 + 0.4) == pytest.approx(1e-2)
    assert not controller.calibrating
    controller.observe(abs_loss_sum=100.0, abs_bonus_sum=1.0)
    assert controller.kappa() == kappa


def test_a_resumed_run_goes_on_with_the_same_kappa():
    batches = [(0.7, 3.0), (0.5, 4.0), (0.6, 1.0), *[(9.0, 9.0)] * 6]
    whole, first, resumed = (controller_of(target_ratio=0.1) for _ in range(3))
    for number, (loss, bonus) in enumerate(batches):
        whole.observe(abs_loss_sum=loss, abs_bonus_sum=bonus)
        if number == 2:
            resumed.load_state_dict(json.loads(json.dumps(first.state_dict())))
        (first if number < 2 else resumed).observe(abs_loss_sum=loss, abs_bonus_sum=bonus)
    assert resumed.kappa() == whole.kappa()
    assert resumed.state_dict() == whole.state_dict()


@pytest.mark.parametrize("sums", [(1.0, 0.0), (1.0, float("nan")), (float("inf"), 1.0)])
def test_a_target_that_cannot_be_met_is_an_error(sums):
    controller = controller_of(target_ratio=0.1)
    with pytest.raises(ValueError, match="cannot be met"):
        controller.observe(abs_loss_sum=sums[0], abs_bonus_sum=sums[1])


def test_a_bonus_that_vanishes_may_be_trained_on_until_it_is_there(two_batches):
    params = KappaParams(target_ratio=0.1)
    controller = KappaController(params, may_vanish=True)
    controller.observe(abs_loss_sum=1.0, abs_bonus_sum=0.0)
    assert (controller.kappa(), controller.vanished) == (0.0, False)
    controller.observe(abs_loss_sum=1.0, abs_bonus_sum=4.0)
    assert controller.kappa() == pytest.approx(0.1 * 2 / 4)
    gone = KappaController(params, may_vanish=True)
    for _ in range(2):
        gone.observe(abs_loss_sum=1.0, abs_bonus_sum=0.0)
    assert (gone.kappa(), gone.vanished) == (0.0, True)


def test_batches_of_ties_alone_leave_no_kappa(two_batches):
    """It would be 0, and the bonus, of which alone ties are trained, off for the iteration."""
    controller = controller_of(target_ratio=0.1)
    controller.observe(abs_loss_sum=0.0, abs_bonus_sum=3.0)
    with pytest.raises(ValueError, match=r"sums to 0.0 \(0 if all pairs are ties\)"):
        controller.observe(abs_loss_sum=0.0, abs_bonus_sum=3.0)
