"""Jobs of a real Slurm cluster that run out of time, or lose their orchestrator in training."""

import psutil
import pytest

from stages.contract.errors import PreemptedError
from stages.store.base import Store
from tests.at_work import said
from tests.launchers.launcher import logs_of
from tests.orchestrators import orchestrator
from tests.slurm.jobs import paused
from tests.stages.train.train_helpers import make_pairs, request_for
from tests.tiny_models import make_tiny_llama

pytestmark = [pytest.mark.slow, pytest.mark.slurm, pytest.mark.timeout(600)]


def test_a_stage_hears_of_its_time_limit_ahead_of_it(launcher, store):
    request = launcher.request(store, behaviour="hang")
    with pytest.raises(PreemptedError, match=r"was sent SIGTERM: by Slurm, near its time limit"):
        launcher.run(request, time_limit="2")
    assert "asked to stop" in logs_of(request) or "CANCELLED" in logs_of(request)


def is_training(process: psutil.Process, store: Store) -> bool:
    """True of a stage's own process, not of the supervisor and srun above it."""
    try:
        words = process.cmdline()
    except psutil.Error:
        return False
    in_store = any(word.startswith(str(store.root)) for word in words)
    return in_store and "stages.train" in words and "stages.harness.supervisor" not in words


def test_a_training_saves_its_step_when_its_orchestrator_is_killed(launcher, store, tmp_path):
    make_tiny_llama(tmp_path / "policy")
    pairs = [make_pairs(tmp_path / "pairs.parquet", 1024)]  # It is not to end before it is paused.

    def training(root):
        # As often as by default: not before the training's end.
        return request_for(root, tmp_path / "policy", pairs, checkpoint_every_steps=None)

    request = training(store.root)
    execution = launcher.execution(request, grace_seconds=60)
    with orchestrator(request, execution, until='"loss"') as (process, _):
        [trainer] = (child for child in psutil.process_iter() if is_training(child, store))
        with paused({trainer}):
            process.kill()
    launcher.await_end(request, [])
    heard = launcher.run(request)
    assert any("going on after step" in line for line in said(heard))
    launcher.run(training(tmp_path / "calm"))
    artifacts = [
        folder.load("train", request.key) for folder in (store, Store.open(str(tmp_path / "calm")))
    ]
    digests = [artifact.manifest.digest("") for artifact in artifacts if artifact]
    assert len(digests) == 2
    assert digests[0] == digests[1]
