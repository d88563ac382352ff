"""Jobs that share no folder with their orchestrator: a store in a bucket that both reach."""

import contextlib
import os
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from flows.pipeline.placement import Execution
from flows.runners.choose import make_runner
from flows.runners.slurm import client
from stages.contract.errors import StageFailedError
from stages.store.opening import open_store
from tests.at_work import AtWork, at_work, said
from tests.flows.probes import wait_until
from tests.lacking import lacking
from tests.no_shared_folder import (
    CREDENTIALS,
    bucket_at,
    check_killed_upload,
    check_loop,
    probe_of,
    reach,
)
from tests.object_storage import objects
from tests.orchestrators import orchestrator
from tests.slurm.jobs import execution, is_over, job_of, settings

pytestmark = [pytest.mark.slow, pytest.mark.slurm, pytest.mark.timeout(600)]

# Address at which the nodes of the tests' own cluster reach this machine.
THIS_MACHINE = "10.77.0.254"


@pytest.fixture
def url(cluster: None, tmp_path: Path) -> Iterator[str]:
    """A store's place in a bucket that this machine and the nodes reach."""
    if not os.environ["SLURM_CONF"].startswith("/tmp/geb-slurm-"):
        lacking("an address of this machine for nodes: the cluster is not the tests' own")
    with bucket_at(THIS_MACHINE, tmp_path) as place:
        yield place
        assert not any(name.startswith("slurm/") for name in objects(place))


def sharing_nothing(tmp_path: Path) -> Execution:
    """Execution as jobs that see of this machine its programs, but no cache and no data."""
    own = [tmp_path / name for name in ("cache", "data")]
    for each in own:
        each.mkdir(exist_ok=True)
    hide = "".join(f"mount -t tmpfs none {shlex.quote(str(each))} && " for each in own)
    credentials = tmp_path / "credentials"
    credentials.write_text("".join(f"export {each}={os.environ[each]}\n" for each in CREDENTIALS))
    return execution(
        shared_folders=[],
        container=shlex.join(["unshare", "--mount", "sh", "-c", f'{hide}exec "$@"', "sh"]),
        environment=settings().environment | reach(),
        set_up=[f". {shlex.quote(str(credentials))}"],
    ).model_copy(update={"sync_seconds": 0.5})


@pytest.fixture
def probes(url: str, tmp_path: Path, probe_stage: None) -> Execution:
    """Execution of probes, and an empty store."""
    open_store(url, create=True)
    return sharing_nothing(tmp_path)


def test_the_loop_runs_without_a_shared_folder(finished: Path, tmp_path: Path, url: str) -> None:
    chosen = sharing_nothing(tmp_path).model_copy(update={"parallel": 2})
    check_loop(finished, tmp_path, url, chosen.model_dump(mode="json", exclude_defaults=True))


def kill_all_of(work: AtWork) -> None:
    """Kills the batch program of a job, its stage, and the program that sends their files."""
    for each in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if each.environ().get("SLURM_JOB_ID") == job_of(work):
                each.kill()


def test_a_job_that_is_killed_after_its_upload_began_leaves_no_half_artifact(
    url: str, probes: Execution, tmp_path: Path
) -> None:
    request = probe_of(url, message="once")
    error = check_killed_upload(request, probes, tmp_path, kill_all_of)
    assert isinstance(error, StageFailedError), error
    [left] = Path("/tmp").glob(f"geb-*-{request.key[:12]}-*")
    assert f"{left}/slurm.out of its node" in str(error), "of the job that could not remove it"
    shutil.rmtree(left)


def test_a_job_outlives_its_orchestrator_until_another_one_takes_it_over(
    url: str, probes: Execution, tmp_path: Path
) -> None:
    request = probe_of(url, behaviour="hang")
    with orchestrator(request, probes, folder=tmp_path) as (_, pids):
        pass
    chosen = make_runner(probes)
    assert chosen.has_running(request)
    with at_work(request, chosen) as work:
        assert said(work.heard)[0].startswith("taking over job ")
        assert work.pids == pids, "what it has said before is heard again"
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_a_job_ends_without_signs_of_its_orchestrator(
    url: str, probes: Execution, tmp_path: Path
) -> None:
    request = probe_of(url, behaviour="hang")
    with orchestrator(request, probes, folder=tmp_path):
        [job] = [each.id for each in client.own_jobs() if not each.is_over]
    wait_until(lambda: is_over(job))
    # The next orchestrator of this host keeps its log.
    make_runner(probes).run(probe_of(url), lambda event: None)
    [left] = open_store(url).log_path("probe", request.key).glob("left-*.log")
    assert "no sign of the orchestrator" in left.read_text()
