"""Processes of a stage that work through one stream of items: each takes the next when it is free.

The number of processes changes no result. If a process ends, the others take its item; with a time
limit the item has no result, and another process takes the place of the one that ended.
"""

import contextlib
import math
import multiprocessing
import os
import pickle
import signal
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Any, Generic, TypeVar

from stages.contract.errors import EXIT_STOPPED, GebError
from stages.contract.request import Resources
from stages.modeling.engine_errors import EngineError

Item = TypeVar("Item")
Result = TypeVar("Result")
_VISIBLE = "CUDA_VISIBLE_DEVICES"
# Both: MKL, if it is told its own number, takes that, and torch follows it.
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
TIMEOUT = "timeout"
CRASH = "crash"
"""Results of items under a time limit that have none of their own."""
# Imports take seconds on a busy machine; more than this means that a process hangs.
_START_SECONDS = 300.0
_ENDED = (
    "a process of this stage ended without a word: killed, or out of memory, since each process "
    "holds a model of its own"
)


@dataclass(eq=False)
class _Worker:
    """A process."""

    process: SpawnProcess
    connection: Connection
    """This end of its pipe."""
    environment: dict[str, str]
    """Its environment variables."""
    task: tuple[int, Any] | None = None
    """The item that it works at, with its number."""
    is_idle: bool = False
    """True while it waits for an item."""
    deadline: float = math.inf
    """When it must have answered, or started."""


class ProcessPool(Generic[Item, Result]):
    """Processes that each hold a function of one item.

    Args:
        load: Loads the function in a process. It is pickled: a module's own function, or a
            `functools.partial` of one.
        environments: Environment variables of each process.
        timeout_seconds: Time limit of an item.

    Raises:
        UserError: From ``load``.
        EngineError: The processes ended while they started.
    """

    def __init__(
        self,
        load: Callable[[], Callable[[Item], Result]],
        environments: Sequence[dict[str, str]],
        timeout_seconds: float | None = None,
    ) -> None:
        self._timeout_seconds = timeout_seconds
        self._load = pickle.dumps(load)
        self._workers: list[_Worker] = []
        try:
            for environment in environments:
                self._workers.append(self._start(environment))
            for _ in self.stream(()):
                pass
        except BaseException:
            self.close()
            raise

    def stream(self, items: Iterable[Item]) -> Iterator[tuple[int, Result]]:
        """Yields (number of the item, result) as they are known; items are taken as there is room.

        Raises:
            UserError: From the function.
            EngineError: The function broke down, or the last process ended.
        """
        waiting = enumerate(items)
        lost: deque[tuple[int, Item]] = deque()
        while True:
            for worker in self._workers:
                if worker.is_idle and (task := lost.popleft() if lost else next(waiting, None)):
                    self._give(worker, task)
            busy = [each for each in self._workers if not each.is_idle]
            if not busy:
                return
            patience = min(each.deadline for each in busy) - time.monotonic()
            wait(
                [each.connection for each in busy],
                None if patience == math.inf else max(0.0, patience),
            )
            for worker in busy:
                if worker.connection.poll():
                    yield from self._hear(worker, lost)
                elif time.monotonic() >= worker.deadline:
                    yield from self._lose(worker, lost, TIMEOUT)

    def close(self) -> None:
        """Ends the processes."""
        for worker in self._workers:
            worker.connection.close()
            if not worker.is_idle:
                # At work, it would notice only with its next result.
                worker.process.kill()
        while self._workers:
            self._workers.pop().process.join()

    def _start(self, environment: dict[str, str]) -> _Worker:
        # Not forked: the parent may hold threads and a GPU.
        context = multiprocessing.get_context("spawn")
        own, other = context.Pipe()
        arguments = other, self._load, environment, self._timeout_seconds
        process = context.Process(target=_work, args=arguments)
        process.start()
        # The process's alone: the pipe ends with it.
        other.close()
        limited = self._timeout_seconds is not None
        deadline = time.monotonic() + _START_SECONDS if limited else math.inf
        return _Worker(process, own, environment, deadline=deadline)

    def _give(self, worker: _Worker, task: tuple[int, Item]) -> None:
        worker.task = task
        worker.is_idle = False
        if self._timeout_seconds is not None:
            worker.deadline = time.monotonic() + self._timeout_seconds
        # If the process has ended, reading from it tells.
        with contextlib.suppress(BrokenPipeError):
            worker.connection.send(task[1])

    def _hear(self, worker: _Worker, lost: deque[Any]) -> Iterator[tuple[int, Any]]:
        try:
            error, result = worker.connection.recv()
        except (EOFError, OSError):
            yield from self._lose(worker, lost, CRASH)
            return
        if error is not None:
            raise error
        task = worker.task
        worker.task = None
        worker.is_idle = True
        worker.deadline = math.inf
        if task is not None:
            yield task[0], result

    def _lose(self, worker: _Worker, lost: deque[Any], why: str) -> Iterator[tuple[int, Any]]:
        """Takes out a process that ended, or that took too long."""
        worker.process.kill()
        worker.process.join()
        worker.connection.close()
        self._workers.remove(worker)
        if self._timeout_seconds is not None and worker.task is not None:
            self._workers.append(self._start(worker.environment))
            yield worker.task[0], why
        elif not self._workers or self._timeout_seconds is not None:
            raise EngineError(_ENDED)
        elif worker.task is not None:
            lost.append(worker.task)


class DevicePool(Generic[Item, Result]):
    """A function on every device of a stage; with one device it is called in this process.

    ``load`` and the errors are those of :class:`ProcessPool`.
    """

    def __init__(self, load: Callable[[], Callable[[Item], Result]], resources: Resources) -> None:
        self._pool: ProcessPool[Item, Result] | None = None
        environments = device_environments(resources)
        # CUDA_VISIBLE_DEVICES may name fewer than the stage has.
        self.size = len(environments)
        if self.size == 1:
            self._call = load()
        else:
            self._pool = ProcessPool(load, environments)

    def map(self, items: Iterable[Item]) -> Iterator[Result]:
        """Results of the items, in their order."""
        if self._pool is None:
            yield from map(self._call, items)
            return
        yield from in_order(self._pool.stream(items))

    def close(self) -> None:
        """Ends the processes."""
        if self._pool is not None:
            self._pool.close()


def in_order(results: Iterable[tuple[int, Result]]) -> Iterator[Result]:
    """Results in the order of their numbers, which count from 0; each is held until its turn."""
    early: dict[int, Result] = {}
    following = 0
    for number, result in results:
        early[number] = result
        while following in early:
            yield early.pop(following)
            following += 1


def device_environments(resources: Resources) -> list[dict[str, str]]:
    """Environment variables of the processes of a stage: its GPU, or its share of the threads."""
    if resources.gpus:
        given = os.environ.get(_VISIBLE)
        devices = given.split(",") if given else [str(index) for index in range(resources.gpus)]
        return [{_VISIBLE: device} for device in devices[: resources.gpus]]
    number = resources.processes
    # `4,2` is 4 outside nested regions; of what is no number OpenMP takes no notice either.
    named = (os.environ.get(name, "").partition(",")[0].strip() for name in _THREADS)
    threads = next((int(each) for each in named if each.isdecimal()), 0) or os.cpu_count() or 1
    return [dict.fromkeys(_THREADS, str(max(1, threads // number)))] * number


def _await_parent() -> None:
    """Ends this process when its parent ends, however that ended."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(EXIT_STOPPED)


def _work(
    connection: Connection, load: bytes, environment: dict[str, str], timeout_seconds: float | None
) -> None:
    """Loads the function in a new process and answers (error, result) until the pool hangs up."""
    # The stage ends its processes; they end with it.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    threading.Thread(target=_await_parent, daemon=True).start()
    # Before torch is imported, which unpickling does.
    os.environ.update(environment)
    # SIGALRM ends this process if the stage is killed while an item hangs; 0 sets no alarm.
    limit = 0 if timeout_seconds is None else math.ceil(2 * timeout_seconds) + 1
    try:
        function = pickle.loads(load)()
        connection.send((None, None))
        while True:
            item = connection.recv()
            signal.alarm(limit)
            result = function(item)
            signal.alarm(0)
            connection.send((None, result))
    except (EOFError, BrokenPipeError):
        # The pool has hung up.
        return
    except (GebError, OSError) as error:
        connection.send((error, None))
    except Exception as error:
        traceback.print_exc()
        text = f"a process of this stage broke down: {type(error).__name__}: {error}"
        connection.send((EngineError(text), None))
