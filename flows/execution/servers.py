"""Servers of a run: each is started at the first step that asks it, and ends with the run.

Of the runs on one store that want the same server, one keeps it and all ask it. When that run ends,
another one starts it anew.
"""

from __future__ import annotations

import contextvars
import socket
import threading
import time
from collections.abc import Mapping
from typing import Any

from flows.pipeline.placement import ON_THIS_MACHINE, Execution
from flows.pipeline.step import Step
from flows.runners.base import SERVE_STEP, OnEvent, PlaceNotice, Runner
from flows.runners.choose import make_runner
from flows.runners.place import orchestrator_lease
from stages.contract.errors import StageFailedError, StoppedError
from stages.contract.events import Event, Log
from stages.contract.params import Settings
from stages.contract.request import Request, make_request
from stages.score.params import ScoreParams
from stages.score.serving import Address, ServeParams, address_path, find_address
from stages.store.base import Store

_MOST_RESTARTS = 3
# A server that has lived for so long does not fail because of its settings.
_WELL_SECONDS = 900.0
_POLL_SECONDS = 0.5
# Longest wait for the threads whose servers have been stopped.
_END_SECONDS = 30.0


class Servers:
    """Servers that the steps of one run ask; safe to use from several threads."""

    def __init__(
        self, store: Store, execution: Execution, resources: Settings, stopping: threading.Event
    ) -> None:
        self._store = store
        # Nobody would stop a server that outlives its orchestrator.
        self._execution = execution.model_copy(update={"on_orchestrator_death": "stop"})
        self._resources = resources
        self._stopping = stopping
        self._lock = threading.Lock()
        self._runner: Runner | None = None
        self._keepers: dict[str, _Keeper] = {}

    def request_for(self, step: Step, request: Request) -> Request | None:
        """Request for the server that a step's stage asks; None if the run serves it none."""
        params = step.params
        if not isinstance(params, ScoreParams) or params.served is None:
            return None
        # A process or container is for its own host, a job or pod for the others too.
        is_local = self._execution.runner in ON_THIS_MACHINE
        machine = socket.gethostname() if is_local else ""
        return make_request(
            ServeParams(engine_args=params.served.server_options, machine=machine),
            inputs={"model": request.inputs["model"]},
            seed=0,
            store=request.store,
            run=request.run,
            step=f"{SERVE_STEP}model",
            resources=getattr(self._resources, ServeParams.stage),
        )

    def wait_for(self, request: Request, on_event: OnEvent) -> Address:
        """Address of a server, which is started if none is there.

        Raises:
            UserError: It cannot be started as the run is configured.
            StageFailedError: It has ended too often.
            StoppedError: The run stops.
        """
        keeper, told = self._keeper(request), ""
        while (address := self.address(request)) is None:
            if keeper.error is not None:
                raise keeper.error
            if keeper.said != told:
                told = keeper.said
                on_event(PlaceNotice(message=f"{request.place}: {told}"))
            if self._stopping.wait(_POLL_SECONDS):
                raise StoppedError(f"{request.place}: stopped while the server starts")
        return address

    def address(self, request: Request) -> Address | None:
        """Address of a server that is at work and has answered."""
        if self._store.lease(request.stage, request.key).holder() is None:
            return None
        return find_address(self._store, request.key)

    def stop(self) -> None:
        """Ends the servers and returns when they are gone; ``stopping`` is set by now."""
        with self._lock:
            runner, keepers = self._runner, list(self._keepers.values())
        if runner is not None:
            runner.stop_all()
        for each in keepers:
            each.thread.join(_END_SECONDS)

    def _keeper(self, request: Request) -> _Keeper:
        with self._lock:
            if self._stopping.is_set():
                raise StoppedError(f"{request.place}: not started, the run stops")
            self._runner = self._runner or make_runner(self._execution)
            if request.key not in self._keepers:
                keeper = _Keeper(request, self._store, self._runner, self._stopping)
                self._keepers[request.key] = keeper
            return self._keepers[request.key]


class _Keeper:
    """Thread that starts a server, again if it ends, once no other run keeps it.

    Attributes:
        said: The last that is known of its start, for those who wait.
        error: Reason why it is not started again.
    """

    def __init__(
        self, request: Request, store: Store, runner: Runner, stopping: threading.Event
    ) -> None:
        self._request = request
        self._store = store
        self._runner = runner
        self._stopping = stopping
        self.said = ""
        self.error: BaseException | None = None
        # The runner asks Prefect for slots of GPUs, as the present flow run.
        run = contextvars.copy_context().run
        self.thread = threading.Thread(target=run, args=(self._keep,), daemon=True)
        self.thread.start()

    def _keep(self) -> None:
        lease = orchestrator_lease(self._request.store, "servers", self._request.key)
        try:
            lease.acquire(waiting=self._wait_for_another, stopping=self._stopping)
            with lease:
                self._serve()
        except (StoppedError, Exception) as error:
            self.error = error

    def _serve(self) -> None:
        request, ended = self._request, 0
        self.said = f"starting, log in {self._store.log_path(request.stage, request.key)}"
        while not self._stopping.wait(_POLL_SECONDS):
            # A killed server's; one that is taken over has its own.
            if not self._runner.has_running(request):
                address_path(self._store, request.key).unlink(missing_ok=True)
            began = time.monotonic()
            try:
                self._runner.run(request, self._hear)
            except StageFailedError as error:
                ended = 1 if time.monotonic() - began > _WELL_SECONDS else ended + 1
                if ended > _MOST_RESTARTS:
                    raise
                self.said = f"starting again ({ended} of {_MOST_RESTARTS}): {error}"

    def _wait_for_another(self, holder: Mapping[str, Any]) -> None:
        self.said = f"another run, pid {holder['pid']} on {holder['host']}, keeps it"

    def _hear(self, event: Event) -> None:
        if isinstance(event, Log):
            self.said = event.message
