"""One process for each device, all with the same model: batches go to whichever is free.

A batch is computed as one process would compute it, and results come in the batches' order: the
number of devices changes no byte.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from tempfile import TemporaryDirectory
from typing import Any, Generic, TypeVar

from stages.contract.errors import StageFailedError
from stages.contract.request import Resources
from stages.modeling.allocator import give_back_freed_memory
from stages.modeling.devices import device_environments, end_with_parent

Item = TypeVar("Item")
Result = TypeVar("Result")

# Batches that are sent ahead for each process, so that none waits for its next one.
_AHEAD = 2


class DevicePool(Generic[Item, Result]):
    """A function on every device of a stage; with one device it is called in this process.

    Args:
        load: Loads the model and returns the function. It is pickled: a module's own function, or
            a `functools.partial` of one.
        resources: Those of the stage: a process for each of its GPUs, or `processes` on the CPU.
        folder: Something that the processes read while they load, and that goes with them.

    Raises:
        UserError: From ``load``.
        StageFailedError: A process ended while it loaded the model.
    """

    def __init__(
        self,
        load: Callable[[], Callable[[Item], Result]],
        resources: Resources,
        folder: TemporaryDirectory[str] | None = None,
    ) -> None:
        self._folder = folder
        devices = device_environments(resources)
        # CUDA_VISIBLE_DEVICES may name fewer than the stage has: one more process would wait for
        # a device for ever.
        self.size = len(devices)
        self._call: Callable[[Item], Result] | None = None
        if self.size == 1:
            self._call = load()
            return
        context = multiprocessing.get_context("spawn")
        environments = context.SimpleQueue()
        for environment in devices:
            environments.put(environment)
        self._processes = ProcessPoolExecutor(
            self.size, context, _start, (environments, pickle.dumps(load))
        )
        try:
            loaded = [self._processes.submit(_require_loaded) for _ in range(self.size)]
            for each in loaded:
                _answer(each)
        except BaseException:
            self.close()
            raise

    def map(self, items: Iterable[Item]) -> Iterator[Result]:
        """Results of the items, in their order.

        Raises:
            UserError: From the function.
            StageFailedError: A process ended.
        """
        if self._call is not None:
            yield from map(self._call, items)
            return
        sent: deque[Future[Any]] = deque()
        for item in items:
            sent.append(self._processes.submit(_compute, item))
            if len(sent) >= self.size * _AHEAD:
                yield _answer(sent.popleft())
        while sent:
            yield _answer(sent.popleft())

    def close(self) -> None:
        """Ends the processes."""
        if self._call is None:
            self._processes.shutdown(cancel_futures=True)
        if self._folder is not None:
            self._folder.cleanup()


def _answer(future: Future[Any]) -> Any:
    try:
        return future.result()
    except BrokenProcessPool as error:
        raise StageFailedError(
            "a process of this stage ended without a word: killed, or out of memory, since each "
            "process holds a model of its own"
        ) from error


# Of a process of the pool: the function, or why there is none.
_function: Callable[[Any], Any] | None = None
_failure: Exception | None = None


def _start(environments: Any, load: bytes) -> None:
    """Loads the model in a new process, on the next device."""
    global _function, _failure
    # The stage ends its processes; they outlive it in no case.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    end_with_parent()
    give_back_freed_memory()
    # Before torch is imported, which unpickling does.
    os.environ.update(environments.get())
    try:
        _function = pickle.loads(load)()
    except Exception as error:
        # An error here would break the pool without a word; the first task raises it.
        _failure = error


def _require_loaded() -> None:
    if _failure is not None:
        raise _failure


def _compute(item: Any) -> Any:
    _require_loaded()
    assert _function is not None
    return _function(item)
