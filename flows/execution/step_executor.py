"""One run at work: its store, runner and view, and how a step becomes an artifact."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from flows.execution.run_record import RunRecord, State, StepRecord
from flows.pipeline.inputs import External
from flows.pipeline.placement import Execution
from flows.pipeline.steps import Output, Source, Step
from flows.runners.choose import make_runner
from stages.contract.disk import explain_disk_errors
from stages.contract.errors import DamagedArtifactError, StoppedError, StoreError
from stages.contract.events import Event, Log
from stages.contract.params import Settings
from stages.contract.request import ArtifactInput, Request, key_fields, make_request
from stages.contract.store import Artifact, Store
from stages.contract.stores import open_store

MadeBy = Mapping[str, Artifact]


@dataclass(frozen=True)
class StepResult:
    """How a step ended."""

    artifact: Artifact
    reused: bool


class Configured(Protocol):
    """What a session needs of the configuration of a flow."""

    @property
    def name(self) -> str:
        """Name of the run."""

    @property
    def store(self) -> str:
        """Place of the store: a folder or a URL."""

    @property
    def execution(self) -> Execution:
        """How stages are started."""

    @property
    def resources(self) -> Settings:
        """`Resources` of each stage, by its name."""


class Watcher(Protocol):
    """Is told what happens in a run; called from several threads."""

    def started(self, step: Step, request: Request) -> None:
        """A stage is started."""

    def event(self, step: Step, event: Event) -> None:
        """A running stage says something."""

    def ended(self, step: Step, state: State, seconds: float, message: str) -> None:
        """A step is done, was found in the store, or failed (``message`` then says why)."""


def build_request(config: Configured, store: Store, step: Step, made: MadeBy) -> Request:
    """The request for a step whose upstream artifacts are known."""

    def reference(source: Source) -> External | ArtifactInput:
        return made[source.step].ref(source.path) if isinstance(source, Output) else source

    return make_request(
        step.params,
        inputs={name: [reference(each) for each in group] for name, group in step.inputs.items()},
        seed=step.seed,
        store=store.location,
        run=config.name,
        step=step.name,
        resources=getattr(config.resources, step.stage),
    )


class StepExecutor:
    """Turns steps into artifacts. Safe to use from several threads.

    Args:
        config: The run's configuration.
        watcher: Is told what happens.
        forced: Tells the steps that are to be computed again although the store has them.
    """

    def __init__(
        self,
        config: Configured,
        watcher: Watcher,
        forced: Callable[[Step], bool] = lambda step: False,
    ) -> None:
        self.config = config
        self.store = open_store(config.store, create=True)
        self.view = RunRecord(self.store, config.name)
        self.runner = make_runner(config.execution)
        self._watcher = watcher
        self._forced = forced
        self._set_aside: set[str] = set()
        self._stopping = threading.Event()
        self._slots = threading.Semaphore(config.execution.parallel)

    @property
    def stopping(self) -> bool:
        """Whether :meth:`stop` was called."""
        return self._stopping.is_set()

    def stop(self) -> None:
        """Ends all running stages and every wait; returns when the stages are gone."""
        self._stopping.set()
        self.runner.stop_all()

    def obtain(self, step: Step, made: MadeBy, on_event: Callable[[Event], None]) -> StepResult:
        """Finds the artifact of a step in the store, or has its stage compute it.

        Args:
            step: The step.
            made: Artifacts of the steps that it reads from.
            on_event: Called with every event of the stage, beside the session's watcher.
        """
        request = build_request(self.config, self.store, step, made)
        started = time.time()

        def note(state: State, message: str = "") -> None:
            nonlocal started
            if state == "running":
                # Waiting for a slot is not the stage's time.
                started = time.time()
                self._record(step, request, state, started, message)
                self._watcher.started(step, request)
                return
            # Told before it is written down: a full disk must not swallow the message.
            self._watcher.ended(step, state, time.time() - started, message)
            self._record(step, request, state, started, message)

        def hear(event: Event) -> None:
            self._watcher.event(step, event)
            on_event(event)

        try:
            with explain_disk_errors(self.store.root):
                self._set_aside_if_forced(step, request, hear)
                found = self._find(request, hear) or self._wait_for_other(request, hear)
                if found is not None:
                    note("reused")
                    return StepResult(found, reused=True)
                with self._slots:
                    if self.stopping:
                        raise StoppedError(f"{step.name}: not started, the run stops")
                    note("running")
                    self.runner.run(request, hear)
                artifact = self.store.load(request.stage, request.key)
        except BaseException as error:
            # Where the store is what failed, that is what to tell.
            with contextlib.suppress(StoreError):
                note("failed", str(error))
            raise
        if artifact is None:
            raise DamagedArtifactError(
                f"{step.name} ended well, but {self.store.location} has no artifact "
                f"{request.stage}/{request.key[:12]}: does the stage see the same store?"
            )
        note("done")
        return StepResult(artifact, reused=False)

    def _find(self, request: Request, hear: Callable[[Event], None]) -> Artifact | None:
        return self.store.find(
            request.stage,
            request.key,
            warn=lambda message: hear(Log(level="warning", message=message)),
        )

    def _wait_for_other(self, request: Request, hear: Callable[[Event], None]) -> Artifact | None:
        """Waits while another run computes the same key, without holding a slot for it."""
        if self.runner.has_running(request):
            return None
        lease = self.store.lease(request.stage, request.key)
        if (holder := lease.holder()) is None:
            return None
        hear(Log(message=f"computed by pid {holder['pid']} on {holder['host']}; waiting for it"))
        while lease.holder() is not None:
            if self._stopping.wait(lease.poll_seconds):
                raise StoppedError(f"{request.step}: stopped while waiting for another run")
        return self._find(request, hear)

    def _set_aside_if_forced(
        self, step: Step, request: Request, hear: Callable[[Event], None]
    ) -> None:
        # Once in a session: what it has computed since then stays.
        if not self._forced(step) or request.key in self._set_aside:
            return
        self._set_aside.add(request.key)
        if self._find(request, hear) is None:
            return
        aside = self.store.set_aside(request.stage, request.key)
        hear(Log(message=f"computed again on purpose; the artifact before is in {aside}"))

    def _record(
        self, step: Step, request: Request, state: State, started: float, message: str
    ) -> None:
        self.view.record(
            StepRecord(
                step=step.name,
                stage=step.stage,
                key=request.key,
                key_fields=key_fields(step.params, step.seed, request.inputs),
                state=state,
                started=started,
                ended=None if state == "running" else time.time(),
                message=message,
            )
        )
