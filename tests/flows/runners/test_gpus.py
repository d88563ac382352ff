"""The locks on a host's GPUs, with GPUs that are there by name alone."""

import os

import pytest

from flows.pipeline.placement import Execution
from flows.runners.local.gpus import _listed_gpus, gpus_of_this_host, hold_gpus
from flows.runners.place import NoRoomError
from stages.contract.errors import UserError
from stages.contract.request import Resources
from tests.flows.probes import gone, wait_until
from tests.orchestrators import orchestrator
from tests.probe_stage import probe_request


@pytest.fixture(autouse=True)
def two_gpus(tmp_path, monkeypatch):
    monkeypatch.setenv("GEB_GPUS", "0,1")
    monkeypatch.setenv("GEB_GPU_LOCKS", str(tmp_path / "locks"))


def test_each_gets_a_gpu_of_its_own_and_the_third_none():
    with hold_gpus(1) as one:
        with hold_gpus(1) as two:
            assert {*one, *two} == {"0", "1"}
            assert has_no_room(1)
        with hold_gpus(1) as three:
            assert three.keys() == two.keys()


def has_no_room(number):
    try:
        with hold_gpus(number):
            return False
    except NoRoomError:
        return True


def test_one_that_finds_too_few_holds_none():
    with hold_gpus(1):
        assert has_no_room(2)
        assert not has_no_room(1)


def test_more_than_there_are_is_refused_with_the_numbers():
    with pytest.raises(UserError, match="asks for 3 GPUs, this host has 2") as caught, hold_gpus(3):
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


def test_the_first_gpu_of_another_job_is_another_gpu(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")

    def in_job(visible, uuid):
        """GPUs as a job of Slurm sees them, which counts its own alone."""
        program = tmp_path / "nvidia-smi"
        program.write_text(f"#!/bin/sh\necho 0, {uuid}\n")
        program.chmod(0o755)
        _listed_gpus.cache_clear()
        monkeypatch.setenv("GEB_GPUS", visible)

    try:
        in_job("0", "GPU-aa")
        with hold_gpus(1):
            in_job("0", "GPU-bb")
            assert not has_no_room(1)
            in_job("GPU-aa", "GPU-aa")
            assert has_no_room(1)
    finally:
        _listed_gpus.cache_clear()


def test_a_killed_orchestrator_s_gpu_is_free_when_its_stage_is_gone(store, probe_stage):
    request = probe_request(store, Resources(gpus=2), behaviour="ignore_sigterm")
    with orchestrator(request, Execution(grace_seconds=8)) as (_, pids):
        pass
    # The stage ignores SIGTERM: it holds its GPUs until it is killed.
    assert has_no_room(1), "the GPU was given out while the stage still ran"
    wait_until(lambda: not has_no_room(1))
    assert all(gone(pid) for pid in pids)


def test_a_lock_can_be_taken_by_another_user_whatever_the_umask(tmp_path):
    before = os.umask(0o077)
    try:
        with hold_gpus(1):
            [lock] = (tmp_path / "locks").glob("*.lock")
    finally:
        os.umask(before)
    assert lock.stat().st_mode & 0o777 == 0o666
