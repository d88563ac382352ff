"""A process for each device: order of results, devices, and errors that keep their words."""

import os
from collections.abc import Callable
from contextlib import closing
from functools import partial

import pytest

from stages.contract.errors import UserError
from stages.contract.request import Resources
from stages.modeling.engine_errors import EngineError
from stages.modeling.process_pool import DevicePool, device_environments

TWO = Resources(processes=2)


def describe(variable: str, number: int) -> tuple[int, str, int]:
    """A number, the process's value of a variable, and the process."""
    return number, os.environ.get(variable, ""), os.getpid()


def load_describe(variable: str) -> Callable[[int], tuple[int, str, int]]:
    return partial(describe, variable)


def refuse_odd(number: int) -> int:
    if number % 2:
        raise UserError(f"{number} is odd", "give even numbers")
    return number


def load_refuse_odd() -> Callable[[int], int]:
    return refuse_odd


def load_nothing() -> Callable[[int], int]:
    raise UserError("no such model", "name another")


def load_dying() -> Callable[[int], None]:
    return os._exit


def test_results_come_in_order_from_all_processes() -> None:
    with closing(DevicePool(partial(load_describe, "OMP_NUM_THREADS"), TWO)) as pool:
        results = list(pool.map(range(100)))
    assert [number for number, _, _ in results] == list(range(100))
    workers = {worker for _, _, worker in results}
    assert 1 <= len(workers) <= 2
    assert os.getpid() not in workers


def test_one_device_needs_no_other_process() -> None:
    pool = DevicePool(partial(load_describe, "NOTHING"), Resources())
    assert list(pool.map([3])) == [(3, "", os.getpid())]
    pool.close()


def test_each_process_has_a_gpu_of_the_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,GPU-7f")
    load = partial(load_describe, "CUDA_VISIBLE_DEVICES")
    with closing(DevicePool(load, Resources(gpus=2))) as pool:
        places = {(worker, device) for _, device, worker in pool.map(range(200))}
    assert {device for _, device in places} <= {"4", "GPU-7f"}
    assert len(places) == len({worker for worker, _ in places})


def test_a_person_s_mistake_keeps_its_remedy() -> None:
    with (
        closing(DevicePool(load_nothing, TWO)) as pool,
        pytest.raises(UserError, match="no such model") as caught,
    ):
        list(pool.map([1]))
    assert caught.value.remedy == "name another"
    with closing(DevicePool(load_refuse_odd, TWO)) as pool:
        with pytest.raises(UserError, match="5 is odd") as caught:
            list(pool.map([2, 4, 5, 6]))
        assert caught.value.remedy == "give even numbers"


def test_a_process_that_dies_is_missed() -> None:
    with (
        closing(DevicePool(load_dying, TWO)) as pool,
        pytest.raises(EngineError, match="was killed, or out of memory"),
    ):
        list(pool.map([9]))


def test_no_process_waits_for_a_device_that_is_not_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    with closing(
        DevicePool(partial(load_describe, "CUDA_VISIBLE_DEVICES"), Resources(gpus=2))
    ) as pool:
        assert pool.size == 1
        assert list(pool.map([5])) == [(5, "3", os.getpid())]


@pytest.mark.parametrize(("threads", "share"), [("8", "4"), ("1", "1"), ("", "3"), ("8,2", "3")])
def test_processes_share_the_threads(
    monkeypatch: pytest.MonkeyPatch, threads: str, share: str
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 6)
    monkeypatch.setenv("OMP_NUM_THREADS", threads)
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
    assert device_environments(TWO) == [dict.fromkeys(names, share)] * 2
