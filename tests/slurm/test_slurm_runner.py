"""Jobs of a real Slurm cluster: their devices, refusals, and what cancels them."""

import pytest

from flows.runners.slurm import client
from stages.contract.errors import PreemptedError, UserError
from tests.at_work import at_work
from tests.launchers.launcher import logs_of
from tests.slurm.jobs import job_of

pytestmark = [pytest.mark.slow, pytest.mark.slurm, pytest.mark.timeout(600)]


def test_a_person_s_scancel_is_not_retried(launcher, store):
    request = launcher.request(store, behaviour="hang")
    with at_work(request, launcher.runner(request)) as work:
        client.cancel(job_of(work))
        error = work.join()
    assert isinstance(error, UserError)
    assert "was cancelled" in error.message


def test_a_stage_hears_of_its_time_limit_ahead_of_it(launcher, store):
    request = launcher.request(store, behaviour="hang")
    with pytest.raises(PreemptedError, match=r"was sent SIGTERM: by Slurm, near its time limit"):
        launcher.run(request, time_limit="2")
    assert "asked to stop" in logs_of(request) or "CANCELLED" in logs_of(request)
