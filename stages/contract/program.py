"""The program around every stage: request in, artifact out, one exit code.

``python -m stages.<name> REQUEST.json`` calls :func:`main`. The stage's function writes into a
scratch folder; the manifest is written last and one rename publishes the whole.
"""

from __future__ import annotations

import contextlib
import datetime
import io
import os
import shutil
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, NoReturn, TypeVar, cast

from stages.contract.context import ResolvedInput, StageContext
from stages.contract.disk import explain_disk_errors
from stages.contract.errors import (
    EXIT_FAILED,
    EXIT_OK,
    EXIT_STOPPED,
    EXIT_USER,
    StoppedError,
    UserError,
)
from stages.contract.events import Done, Emitter, Failure
from stages.contract.kept import KeptEngine
from stages.contract.local_store import LocalStore
from stages.contract.manifest import describe_files, make_manifest
from stages.contract.params import StageParams
from stages.contract.request import Request
from stages.contract.request_checks import checked_params, read_request, resolved_input
from stages.contract.signature import check_outputs
from stages.contract.store import Artifact

P = TypeVar("P", bound=StageParams)

USAGE = "usage: python -m stages.{name} REQUEST.json"


@dataclass(frozen=True)
class Stage(Generic[P]):
    """A stage: its parameters' type and the function that computes it.

    Attributes:
        params: Type of the parameters; names the stage and its version.
        run: Reads ``context.inputs``, writes into ``context.out``.
    """

    params: type[P]
    run: Callable[[StageContext[P]], None]

    @property
    def name(self) -> str:
        """Name of the stage."""
        return self.params.stage


def execute(
    stage: Stage[Any], request: Request, events: Emitter, kept: KeptEngine | None = None
) -> Artifact:
    """Computes a request's artifact in this process, or finds it in the store.

    Args:
        stage: The stage.
        request: The request; those after it are not looked at.
        events: Receiver of progress and messages.
        kept: Engine of the request before it; None where there was none.

    Raises:
        UserError: The request, its inputs or the data are wrong.
        StoppedError: SIGTERM came.
    """
    params = checked_params(stage.params, request)
    store = LocalStore.open(request.store)
    lease = store.lease(request.stage, request.key)
    lease.acquire(
        waiting=lambda holder: events.info(
            f"{request.stage} {request.key[:12]} is being computed by pid {holder['pid']} on "
            f"{holder['host']}; waiting"
        )
    )
    with lease, explain_disk_errors(store.root):
        found = store.find(request.stage, request.key, warn=events.warning)
        if found is not None:
            events.info("the store has it by now")
            return found
        store.sweep_scratch(request.stage, request.key)
        inputs = {
            name: tuple(resolved_input(store, name, each) for each in group)
            for name, group in request.inputs.items()
        }
        scratch = store.new_scratch(request.stage, request.key)
        try:
            return _compute(
                stage, params, request, store, scratch, inputs, events, lease.check, kept
            )
        finally:
            shutil.rmtree(scratch, ignore_errors=True)


def execute_all(
    stage: Stage[Any], request: Request, events: Emitter
) -> Iterator[tuple[Request, Artifact]]:
    """Computes a request and those after it, with one engine as far as they agree on it.

    Yields:
        Each request, once its artifact is in place.

    Raises:
        GebError: As :func:`execute`; the requests before have their artifacts.
    """
    kept = KeptEngine()
    try:
        for number, each in enumerate(request.all, 1):
            kept.is_wanted_again = number < len(request.all)
            yield each, execute(stage, each, events, kept)
    finally:
        # The last may have needed none.
        kept.close()


def _compute(
    stage: Stage[Any],
    params: StageParams,
    request: Request,
    store: LocalStore,
    scratch: Path,
    inputs: dict[str, tuple[ResolvedInput, ...]],
    events: Emitter,
    check_lease: Callable[[], None],
    kept: KeptEngine | None,
) -> Artifact:
    work = store.work_path(request.stage, request.key)
    work.mkdir(parents=True, exist_ok=True)
    context = StageContext(
        params=params,
        seed=request.seed,
        out=scratch,
        work=work,
        store=store,
        events=events,
        inputs=inputs,
        resources=request.resources,
        run=request.run,
        step=request.step,
        kept=kept or KeptEngine(),
    )
    started = _now()
    stage.run(context)
    check_lease()
    files = describe_files(scratch, context.telemetry)
    check_outputs(request.stage, params.outputs, files)
    manifest = make_manifest(
        request,
        files=files,
        started=started,
        ended=_now(),
        notes=context.notes,
    )
    return store.publish(scratch, manifest)


def main(stage: Stage[Any]) -> NoReturn:
    """Runs a stage as a program: ``sys.argv[1]`` is the request, the exit code is the result."""
    if len(sys.argv) != 2 or sys.argv[1] in ("-h", "--help"):
        sys.stderr.write(f"{USAGE.format(name=stage.name)}\n\n{stage.params.__doc__}\n")
        sys.exit(EXIT_OK if "--help" in sys.argv or "-h" in sys.argv else EXIT_USER)
    events = Emitter(_claim_stdout())
    signal.signal(signal.SIGTERM, _stop)
    try:
        for request, artifact in execute_all(stage, read_request(Path(sys.argv[1])), events):
            events.emit(Done(path=str(artifact.path), key=request.key))
    except UserError as error:
        events.emit(Failure(kind="user", message=error.message, remedy=error.remedy))
        _exit(EXIT_USER)
    except StoppedError as error:
        events.emit(Failure(kind="stopped", message=str(error)))
        _exit(EXIT_STOPPED)
    except (Exception, SystemExit) as error:
        # A library's or an oracle's own sys.exit(0) leaves no artifact: that is a failure.
        traceback.print_exc()
        events.emit(Failure(kind="crash", message=f"{type(error).__name__}: {error}"))
        _exit(EXIT_FAILED)
    _exit(EXIT_OK)


def _claim_stdout() -> Any:
    """Keeps stdout for events; whatever libraries print goes to stderr, the log."""
    stream = os.fdopen(os.dup(1), "w", encoding="utf-8")
    sys.stdout.flush()
    os.dup2(2, 1)
    # As stderr does it: every line is in the log before the next one, however the program ends.
    cast(io.TextIOWrapper, sys.stdout).reconfigure(line_buffering=True)
    return stream


def _stop(signum: int, frame: object) -> None:
    # Once only: a second SIGTERM must not interrupt the clean-up after the first.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise StoppedError("asked to stop (SIGTERM)")


def _exit(code: int) -> NoReturn:
    """Ends the process without waiting for threads that libraries left."""
    for each in (sys.stdout, sys.stderr):
        with contextlib.suppress(BrokenPipeError):
            each.flush()
    os._exit(code)


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
