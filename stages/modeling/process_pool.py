"""A function on every device of a stage: each process takes the next item when it is free."""

import multiprocessing
import os
import pickle
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.queues import SimpleQueue
from typing import Any, Generic, TypeVar

from stages.contract.request import Resources
from stages.harness.supervisor import die_with_parent
from stages.modeling.engine_errors import EngineError

Item = TypeVar("Item")
Result = TypeVar("Result")
_VISIBLE = "CUDA_VISIBLE_DEVICES"
# Both: MKL prefers its variable, and torch follows MKL.
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
# A process's pickled loader, and then the function that it loaded.
_state: dict[str, Any] = {}


class DevicePool(Generic[Item, Result]):
    """A function on every device of a stage; with one device it is called in this process.

    ``load`` loads the function. It is pickled: a module's own function, or a `functools.partial` of
    one. The number of processes changes no result.
    """

    def __init__(self, load: Callable[[], Callable[[Item], Result]], resources: Resources) -> None:
        environments = device_environments(resources)
        # CUDA_VISIBLE_DEVICES may name fewer than the stage has.
        self.size = len(environments)
        self._executor: ProcessPoolExecutor | None = None
        if self.size == 1:
            self._call = load()
            return
        # Not forked: this process may hold threads and a GPU.
        context = multiprocessing.get_context("spawn")
        queue = context.SimpleQueue()
        for environment in environments:
            queue.put(environment)
        self._executor = ProcessPoolExecutor(
            self.size, context, initializer=_start, initargs=(queue, pickle.dumps(load))
        )

    def map(self, items: Iterable[Item]) -> Iterator[Result]:
        """Results of the items, in their order.

        Raises:
            UserError: From ``load`` or the function.
            EngineError: A process ended.
        """
        if self._executor is None:
            yield from map(self._call, items)
            return
        try:
            yield from self._executor.map(_call, items)
        except BrokenProcessPool as error:
            raise EngineError(
                "a process of this stage was killed, or out of memory: each process holds a model"
            ) from error

    def close(self) -> None:
        """Ends the processes."""
        if self._executor is not None:
            self._executor.shutdown(wait=False, cancel_futures=True)


def device_environments(resources: Resources) -> list[dict[str, str]]:
    """Environment variables of the processes of a stage: its GPU, or its share of the threads."""
    if resources.gpus:
        given = os.environ.get(_VISIBLE)
        devices = given.split(",") if given else [str(index) for index in range(resources.gpus)]
        return [{_VISIBLE: device} for device in devices[: resources.gpus]]
    number = resources.processes
    limit = os.environ.get(_THREADS[0], "")
    threads = int(limit) if limit.isdecimal() else os.cpu_count() or 1
    return [dict.fromkeys(_THREADS, str(max(1, threads // number)))] * number


def _start(environments: SimpleQueue[dict[str, str]], load: bytes) -> None:
    die_with_parent()
    # Before torch is imported, which unpickling does.
    os.environ.update(environments.get())
    _state["load"] = load


def _call(item: Any) -> Any:
    if "function" not in _state:
        _state["function"] = pickle.loads(_state["load"])()
    return _state["function"](item)
