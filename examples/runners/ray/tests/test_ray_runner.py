"""The runner of examples/runners/ray on a real Ray of two nodes."""

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from examples.runners.ray.tests.conftest import RayCluster
from flows.pipeline.placement import Execution
from flows.runners.base import Runner
from flows.runners.choose import make_runner
from stages.contract.errors import PreemptedError, RefusedError, StoppedError, UserError
from stages.contract.request import Resources
from stages.store.base import Store
from tests.at_work import AtWork, at_work, said
from tests.flows.loop import plan, result_digests, write_config
from tests.probe_requests import probe_request
from tests.programs import run_program
from tests.two_nodes import Fault, make_inputs, outlives, train, training

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800), pytest.mark.usefixtures("installed")]


def runner(cluster: RayCluster, grace_seconds: float = 5, **changes: Any) -> Runner:
    settings = cluster.settings(**changes)
    values = {"runner": "ray", "runner_settings": settings, "grace_seconds": grace_seconds}
    return make_runner(Execution.model_validate(values))


@pytest.fixture
def store(tmp_path: Path, probe_stage: None) -> Store:
    return Store.open(str(tmp_path / "store"), create=True)


def test_a_stage_reports_leaves_its_artifact_and_may_refuse(
    store: Store, cluster: RayCluster
) -> None:
    request = probe_request(store, message="hello", prints="to the log")
    heard: list[Any] = []
    runner(cluster).run(request, heard.append)
    assert "hello" in said(heard)
    assert store.load("probe", request.key) is not None
    [log] = store.log_path("probe", request.key).glob("*.log")
    assert "to the log" in log.read_text()
    assert list((store.root / "ray").iterdir()) == [], "the job's folder is gone"
    with pytest.raises(UserError, match="bad value 7") as caught:
        runner(cluster).run(probe_request(store, behaviour="refuse"), heard.append)
    assert caught.value.remedy == "use 8"


def test_a_stopped_run_lets_its_stage_end_and_leaves_no_process(
    store: Store, cluster: RayCluster
) -> None:
    chosen = runner(cluster)
    with at_work(probe_request(store, behaviour="leave_child"), chosen) as work:
        chosen.stop_all()
        assert isinstance(work.join(), StoppedError)
    assert not any(psutil.pid_exists(each) for each in work.pids)


def test_what_the_cluster_never_has_is_refused(store: Store, cluster: RayCluster) -> None:
    request = probe_request(store, Resources(gpus=4))
    with pytest.raises(RefusedError, match="Ray has not had 1 nodes with"):
        runner(cluster, pending_seconds=2).run(request, lambda event: None)


def test_the_loop_gives_the_artifacts_of_the_process_runner(
    cluster: RayCluster, finished: Path, tmp_path: Path
) -> None:
    execution = {"runner": "ray", "parallel": 2, "runner_settings": cluster.settings()}
    config = write_config(tmp_path, execution=execution)
    # A new process: what is installed is read as Python starts.
    done = run_program(sys.executable, "-m", "flows.commands.cli", "run", config)
    assert done.returncode == 0, done.stdout + done.stderr
    assert result_digests(tmp_path / "store") == result_digests(finished.parent / "store")
    planned = plan(config, "--runner", "process")
    assert {each["action"] for each in planned.values()} == {"reuse"}, "processes find it all"


def test_a_training_on_two_nodes_outlives_the_loss_of_one_with_the_same_bytes(
    cluster: RayCluster, tmp_path: Path
) -> None:
    inputs = make_inputs(tmp_path)

    def chosen() -> Runner:
        return runner(cluster)

    @contextlib.contextmanager
    def node_killed(work: AtWork, processes: set[psutil.Process]) -> Iterator[None]:
        with cluster.without_second_node():
            yield

    # Ray tells of steps some seconds later, and the training shall not be over by then.
    calm, disturbed = (training(inputs, tmp_path / name, epochs=200) for name in ("calm", "store"))
    undisturbed = train(calm, chosen(), lambda event: None)
    fault = Fault(node_killed, chosen, PreemptedError, "Ray has lost its node")
    outlives(disturbed, [fault], undisturbed)
