"""The locks on a host's GPUs, with GPUs that are there by name alone."""

import os
import threading

import pytest

from flows.pipeline.placement import Execution
from flows.runners.local.gpus import gpus_of_this_host, hold_gpus
from stages.contract.errors import StoppedError, UserError
from stages.contract.request import Resources
from tests.flows.probes import gone
from tests.orchestrators import orchestrator
from tests.probe_stage import probe_request


@pytest.fixture(autouse=True)
def two_gpus(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("GEB_GPUS", "0,1")
    monkeypatch.setenv("GEB_GPU_LOCKS", str(tmp_path / "locks"))


class Holder:
    """A holder of GPUs in a thread: it opens the lock files itself, as another process would."""

    def __init__(self, number: int) -> None:
        self.got = threading.Event()
        self.waits = threading.Event()
        self.stopping = threading.Event()
        self.held: dict[str, int] = {}
        self.error: BaseException | None = None
        self._enough = threading.Event()
        self._number = number
        self._thread = threading.Thread(target=self._hold)
        self._thread.start()

    def _hold(self) -> None:
        def waits(message: str) -> None:
            self.waits.set()

        try:
            with hold_gpus(self._number, waiting=waits, stopping=self.stopping) as self.held:
                self.got.set()
                self._enough.wait()
        except StoppedError as error:
            self.error = error

    def let_go(self) -> None:
        self._enough.set()
        self._thread.join()

    def stop(self) -> None:
        self.stopping.set()
        self._thread.join()


def test_each_gets_a_gpu_of_its_own_and_the_third_waits():
    one, two = Holder(1), Holder(1)
    assert one.got.wait(60)
    assert two.got.wait(60)
    assert {*one.held, *two.held} == {"0", "1"}
    three = Holder(1)
    assert three.waits.wait(60)
    assert not three.got.is_set()
    freed = one.held
    one.let_go()
    assert three.got.wait(60)
    assert three.held == freed
    two.let_go()
    three.let_go()


def test_two_that_want_both_do_not_wait_for_each_other_for_ever():
    small = Holder(1)
    assert small.got.wait(60)
    large = [Holder(2), Holder(2)]
    assert all(gpu.waits.wait(60) for gpu in large)
    small.let_go()
    while not (first := [gpu for gpu in large if gpu.got.is_set()]):
        assert all(gpu.error is None for gpu in large)
    assert len(first) == 1
    first[0].let_go()
    [second] = [gpu for gpu in large if gpu is not first[0]]
    assert second.got.wait(60)
    assert set(second.held) == {"0", "1"}
    second.let_go()


def test_a_wait_can_be_ended():
    holder = Holder(2)
    assert holder.got.wait(60)
    waiter = Holder(1)
    assert waiter.waits.wait(60)
    waiter.stop()
    assert isinstance(waiter.error, StoppedError)
    holder.let_go()


def test_more_than_there_are_is_refused_with_the_numbers():
    holder = hold_gpus(3, waiting=pytest.fail, stopping=threading.Event())
    with pytest.raises(UserError, match="asks for 3 GPUs, this host has 2") as caught, holder:
        pass
    assert "resources" in caught.value.remedy


def test_devices_that_the_environment_hides_are_not_given_out(monkeypatch):
    monkeypatch.delenv("GEB_GPUS")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,GPU-8a2b")
    assert gpus_of_this_host() == ["3", "GPU-8a2b"]
    for none in ("", "-1", "NoDevFiles", "-1,0"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", none)
        assert gpus_of_this_host() == []
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,-1,3")
    assert gpus_of_this_host() == ["2"]


def test_a_killed_orchestrator_s_gpu_is_free_when_its_stage_is_gone(store, probe_stage):
    request = probe_request(store, Resources(gpus=2), behaviour="ignore_sigterm")
    with orchestrator(request, Execution(grace_seconds=8)) as (_, pids):
        pass
    # The stage ignores SIGTERM: it holds its GPUs until it is killed.
    waiter = Holder(1)
    assert waiter.got.wait(60)
    assert all(gone(pid) for pid in pids)
    assert waiter.waits.is_set(), "the GPU was given out while the stage still ran"
    waiter.let_go()


def test_a_lock_can_be_taken_by_another_user_whatever_the_umask(tmp_path):
    before = os.umask(0o077)
    try:
        with hold_gpus(1, waiting=print, stopping=threading.Event()):
            [lock] = (tmp_path / "locks").glob("*.lock")
    finally:
        os.umask(before)
    assert lock.stat().st_mode & 0o777 == 0o666
