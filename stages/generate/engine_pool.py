"""Several engines with one policy, each in a process on devices of its own, fed from one queue."""

from __future__ import annotations

import multiprocessing
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Any

from pydantic import BaseModel

from stages.contract.events import Emitter
from stages.contract.request import Resources
from stages.generate.backend import Prompt, Sample, Sampling
from stages.generate.engine_process import Answer, Failed, Ready, Wanted, work
from stages.generate.params import GenerateParams
from stages.generate.policy import Policy
from stages.generate.units import Place, Unit, split_units
from stages.modeling.devices import device_environments
from stages.modeling.engines import EngineError

# vLLM's engines of several workers would all bind their threads to the same cores.
_UNBOUND = {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}
_ENDED = (
    "an engine's process ended without a word: killed, or out of memory, since each engine holds "
    "a model of its own"
)


@dataclass(eq=False)
class _Engine:
    """An engine's process.

    Attributes:
        process: The process.
        connection: This end of its pipe.
        open: Places that it has not answered yet, each with its unit.
        is_idle: Whether it waits for a unit and has nothing else to do.
    """

    process: SpawnProcess
    connection: Connection
    open: dict[Place, Unit] = field(default_factory=dict)
    is_idle: bool = False


class EnginePool:
    """Engines of a local backend; see :class:`stages.generate.backend.Backend`.

    An engine asks for a unit of prompts when it has room for one. The units of an engine whose
    process ends go to the others.

    Args:
        policy: The policy.
        params: Engine settings.
        resources: Those of the stage; each engine takes ``params.devices_per_engine`` of them.
        events: Is told what the engines say, each thing once.

    Raises:
        UserError: From an engine: it refuses the model or a setting.
        EngineError: An engine does not start, or its process ended while it did.
    """

    def __init__(
        self, policy: Policy, params: GenerateParams, resources: Resources, events: Emitter
    ) -> None:
        self._events = events
        self._said: set[str] = set()
        self._engines: list[_Engine] = []
        base = {} if resources.gpus else _UNBOUND
        try:
            for environment in device_environments(resources, params.devices_per_engine):
                self._engines.append(_start(policy, params, base | environment))
            notes = [self._await_ready(engine) for engine in self._engines]
        except BaseException:
            self.close()
            raise
        self.notes: Mapping[str, Any] = {**notes[0], "engines": len(notes)}

    def generate(
        self, prompts: Iterator[Prompt], sampling: Sampling
    ) -> Iterator[tuple[int, int, Sample]]:
        """Continues every prompt once per seed; see :class:`stages.generate.backend.Backend`.

        Raises:
            UserError: From an engine.
            EngineError: An engine broke down, or the process of the last one ended.
        """
        for engine in self._engines:
            _send(engine, sampling)
        queue = _Queue(split_units(prompts, sampling.params))
        while not self._is_done(queue):
            for engine in self._next_to_speak():
                try:
                    message = engine.connection.recv()
                except (EOFError, OSError):
                    self._bury(engine, queue)
                    continue
                if isinstance(message, Wanted):
                    engine.is_idle = message.idle
                    if not message.idle:
                        _send(engine, queue.next_unit())
                elif isinstance(message, Answer):
                    engine.open.pop(message.place, None)
                    if queue.close_place(message.place):
                        yield *message.place, message.sample
                else:
                    self._hear(message)

    def close(self) -> None:
        """Ends the engines and their processes."""
        for engine in self._engines:
            engine.connection.close()
            if not engine.is_idle:
                # At work, it would notice only with its next response.
                engine.process.kill()
        for engine in self._engines:
            engine.process.join()

    def _await_ready(self, engine: _Engine) -> dict[str, Any]:
        while True:
            try:
                message = engine.connection.recv()
            except (EOFError, OSError) as error:
                raise EngineError(_ENDED) from error
            if isinstance(message, Ready):
                return message.notes
            self._hear(message)

    def _is_done(self, queue: _Queue) -> bool:
        """Hands units to the engines that wait for one; whether all wait and there is none."""
        for engine in self._engines:
            if engine.is_idle and (unit := queue.next_unit()) is not None:
                _send(engine, unit)
                engine.is_idle = False
        return all(engine.is_idle for engine in self._engines)

    def _next_to_speak(self) -> list[_Engine]:
        ready = wait([engine.connection for engine in self._engines])
        return [engine for engine in self._engines if engine.connection in ready]

    def _hear(self, message: Failed | BaseModel) -> None:
        if isinstance(message, Failed):
            raise message.error
        if (said := message.model_dump_json()) not in self._said:
            self._said.add(said)
            self._events.emit(message)

    def _bury(self, engine: _Engine, queue: _Queue) -> None:
        """Takes an engine out whose process has ended."""
        self._engines.remove(engine)
        engine.connection.close()
        engine.process.join()
        if not self._engines:
            raise EngineError(_ENDED)
        queue.give_back(engine.open.values())
        self._events.warning(f"{_ENDED}; {len(self._engines)} go on with its prompts")


class _Queue:
    """Units to be sampled, and the places that are not answered yet."""

    def __init__(self, units: Iterator[Unit]) -> None:
        self._units = units
        self._lost: deque[Unit] = deque()
        self._open: set[Place] = set()

    def next_unit(self) -> Unit | None:
        """The next unit, or None where there is none now."""
        if self._lost:
            return self._lost.popleft()
        unit = next(self._units, None)
        if unit is not None:
            self._open.update(unit.places)
        return unit

    def close_place(self, place: Place) -> bool:
        """Notes an answer; False where there was one before."""
        if place not in self._open:
            return False
        self._open.remove(place)
        return True

    def give_back(self, units: Iterable[Unit]) -> None:
        """Takes units back that are to be sampled by another engine, from their beginning."""
        self._lost.extend({id(unit): unit for unit in units}.values())


def _start(policy: Policy, params: GenerateParams, environment: dict[str, str]) -> _Engine:
    context = multiprocessing.get_context("spawn")
    own, other = context.Pipe()
    process = context.Process(target=work, args=(other, policy, params, environment))
    process.start()
    # The engine's alone: the pipe ends with its process.
    other.close()
    return _Engine(process, own)


def _send(engine: _Engine, message: Unit | Sampling | None) -> None:
    if isinstance(message, Unit):
        engine.open.update(dict.fromkeys(message.places, message))
    try:
        engine.connection.send(message)
    except BrokenPipeError:
        # Its end is found when it is read from.
        return
