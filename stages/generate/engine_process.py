"""Process of one engine: samples the units that its pool sends, until the pool hangs up."""

from __future__ import annotations

import importlib
import os
import signal
import traceback
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from itertools import count
from multiprocessing.connection import Connection
from typing import Any

from pydantic import BaseModel

from stages.contract.errors import GebError
from stages.contract.events import Emitter
from stages.generate.backend import Backend, Prompt, Sample, Sampling
from stages.generate.params import BACKENDS, GenerateParams
from stages.generate.policy import Policy
from stages.generate.units import Place, Unit, takes_stream
from stages.modeling.devices import end_with_parent
from stages.modeling.engines import EngineError


@dataclass(frozen=True)
class Ready:
    """The engine has the policy loaded.

    Attributes:
        notes: Its facts for the manifest.
    """

    notes: dict[str, Any]


@dataclass(frozen=True)
class Wanted:
    """The engine has room for a unit.

    Attributes:
        idle: It has nothing else to do, and waits for one; otherwise it is answered at once, with
            None where there is none.
    """

    idle: bool


@dataclass(frozen=True)
class Answer:
    """A response.

    Attributes:
        place: Number of the prompt and sample index.
        sample: The response.
    """

    place: Place
    sample: Sample


@dataclass(frozen=True)
class Failed:
    """The engine cannot go on.

    Attributes:
        error: What the stage is to raise.
    """

    error: GebError


def work(
    connection: Connection, policy: Policy, params: GenerateParams, environment: dict[str, str]
) -> None:
    """Loads an engine on its devices and samples what comes through the connection."""
    # The stage ends its engines; they outlive it in no case.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    end_with_parent()
    # Before torch and vLLM are imported.
    os.environ.update(environment)
    try:
        _serve(connection, policy, params)
    except (EOFError, BrokenPipeError):
        # The pool has hung up.
        return
    except GebError as error:
        connection.send(Failed(error))
    except Exception as error:
        traceback.print_exc()
        connection.send(
            Failed(EngineError(f"an engine broke down: {type(error).__name__}: {error}"))
        )


def _serve(connection: Connection, policy: Policy, params: GenerateParams) -> None:
    module = importlib.import_module(BACKENDS[params.backend])
    backend: Backend = module.load(policy, params, _Told(connection))
    with closing(backend):
        connection.send(Ready(dict(backend.notes)))
        units = Units(connection)
        while True:
            # Before the engine is asked: the pool may send the settings of another sampling first.
            unit, sampling = units.await_first()
            for index, seed, sample in backend.generate(units.prompts(unit), sampling):
                connection.send(Answer(units.place(index, seed), sample))


class Units:
    """Prompts of the units that the pool sends, and their places in the stream of all.

    Memory holds the units of which a response is awaited: a stream has as many as a shard.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._sampling: Sampling | None = None
        # Of the engine's own number for a prompt: its unit, its index there, the seeds awaited.
        self._open: dict[int, tuple[Unit, int, set[int]]] = {}

    def await_first(self) -> tuple[Unit, Sampling]:
        """Waits for a unit; returns it with the settings under which it is to be sampled."""
        self._connection.send(Wanted(idle=True))
        while isinstance(message := self._connection.recv(), Sampling):
            self._sampling = message
        assert self._sampling is not None
        return message, self._sampling

    def prompts(self, first: Unit) -> Iterator[Prompt]:
        """Yields the prompts of a unit and, to an engine that takes a stream, of those after it."""
        assert self._sampling is not None
        numbers = count()
        unit: Unit | None = first
        while unit is not None:
            for index, prompt in enumerate(unit.prompts):
                self._open[next(numbers)] = unit, index, set(range(len(prompt.seeds)))
                yield prompt
            unit = self._ask() if takes_stream(self._sampling.params) else None

    def place(self, index: int, seed: int) -> Place:
        """Place of a response, from the engine's own numbers for it; asked for once."""
        unit, own, awaited = self._open[index]
        awaited.remove(seed)
        if not awaited:
            del self._open[index]
        return unit.place(own, seed)

    def _ask(self) -> Unit | None:
        self._connection.send(Wanted(idle=False))
        unit: Unit | None = self._connection.recv()
        return unit


class _Told(Emitter):
    """Emitter whose events go to the pool."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._last_progress = float("-inf")

    def emit(self, event: BaseModel) -> None:
        """Sends one event."""
        self._connection.send(event)
