"""The program around every stage: request in and checked, artifact out, one exit code.

``python -m stages.<name> REQUEST.json`` calls :func:`main`. The stage's function writes into a
scratch folder; the manifest is written last and one rename publishes the whole.
"""

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

from pydantic import ValidationError

from stages.contract.atomic import explain_disk_errors
from stages.contract.digests import digest_of, files_of, sha256_of, state_of
from stages.contract.errors import (
    EXIT_FAILED,
    EXIT_OK,
    EXIT_STOPPED,
    EXIT_USER,
    DamagedArtifactError,
    GebError,
    StoppedError,
    UserError,
)
from stages.contract.events import Emitter, Failure
from stages.contract.manifest import describe_files, make_manifest
from stages.contract.number_types import this_processor
from stages.contract.params import StageParams
from stages.contract.records import read_record
from stages.contract.request import FileInput, HubInput, Input, Request, key_fields
from stages.harness.context import FoundInput, StageContext
from stages.store.base import Artifact, Store

P = TypeVar("P", bound=StageParams)


@dataclass(frozen=True)
class Stage(Generic[P]):
    """A stage: its parameters' type, which names it, and the function that computes it.

    ``run`` reads ``context.inputs`` and writes into ``context.out``.
    """

    params: type[P]
    run: Callable[[StageContext[P]], None]


def execute(stage: Stage[Any], request: Request, events: Emitter) -> Artifact:
    """Computes a request's artifact in this process, or finds it in the store.

    Raises:
        UserError: The request, its inputs or the data are wrong.
        StoppedError: SIGTERM came.
    """
    params = checked_params(stage.params, request)
    store = Store.in_folder(request.store)
    lease = store.lease(request.stage, request.key)
    with explain_disk_errors(store.root):
        lease.acquire(
            waiting=lambda holder: events.info(
                f"{request.stage} {request.key[:12]} is being computed by pid {holder.pid} on "
                f"{holder.host}; waiting"
            )
        )
    with explain_disk_errors(store.root), lease:
        artifact = store.find(request.stage, request.key, warn=events.warning)
        if artifact is not None:
            events.info("the store already has it")
            return artifact
        context = StageContext(
            request,
            params=params,
            inputs={
                name: tuple(found_input(store, name, source) for source in group)
                for name, group in request.inputs.items()
            },
            out=store.new_scratch(request.stage, request.key),
            store=store,
            events=events,
        )
        try:
            context.work.mkdir(parents=True, exist_ok=True)
            started = _now()
            stage.run(context)
            lease.check()
            files = describe_files(context.out, context.telemetry)
            for pattern, spec in stage.params.outputs.items():
                if not spec.optional and not any(context.out.glob(pattern)):
                    raise GebError(f"stage {request.stage!r} ended without its output {pattern!r}")
            manifest = make_manifest(request, files=files, started=started, ended=_now())
            return store.publish(context.out, manifest)
        finally:
            shutil.rmtree(context.out, ignore_errors=True)


_OTHER_VERSION = (
    "install the same version of geb for the orchestrator and for the stage (rebuild the image, or "
    "the stage's environment)"
)


def main(stage: Stage[Any]) -> NoReturn:
    """Runs a stage as a program: its argument is the request, the exit code is the result.

    The request is a file, or an object of the store in a bucket.
    """

    def work(events: Emitter) -> None:
        place = sys.argv[-1]
        if len(sys.argv) != 2 or place.startswith("-"):
            raise UserError(f"usage: python -m stages.{stage.params.stage} REQUEST.json")
        if "://" in place:
            # Here: stages whose store is a folder need no client of object storage.
            from stages.harness.from_bucket import execute_from_bucket

            execute_from_bucket(stage, place, events)
        else:
            request = read_record(Path(place), Request, _OTHER_VERSION)
            execute(stage, request, events)

    run_program(work)


def run_program(work: Callable[[Emitter], None]) -> NoReturn:
    """Does the work of a program and ends it; the exit code is the result.

    Stdout takes its events, among them why it failed.
    """
    events = Emitter(_claim_stdout())
    signal.signal(signal.SIGTERM, _stop)
    try:
        work(events)
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


@contextlib.contextmanager
def deferred_stop() -> Iterator[Callable[[], bool]]:
    """Lets SIGTERM wait within the block; gives it a function that tells whether one came.

    For work that must save before it ends with a :class:`StoppedError`; in the main thread. After
    the block a second SIGTERM, which several senders may send, does not disturb the program's end.
    """
    # No event of threading: a signal amid its set() would wait for the lock of the same thread.
    signals: list[int] = []
    previous = signal.signal(signal.SIGTERM, lambda signum, frame: signals.append(signum))
    try:
        yield lambda: bool(signals)
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN if signals else previous)


def _exit(code: int) -> NoReturn:
    """Ends the process without waiting for threads that libraries left."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(BrokenPipeError):
            stream.flush()
    os._exit(code)


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")


# Oracles, templates and most prompts. Larger inputs, such as weights, are hashed only if their
# sizes or times of modification have changed: it takes minutes.
_HASHED_BYTES = 256 << 20


def checked_params(kind: type[StageParams], request: Request) -> StageParams:
    """Parameters of a request, whose key and inputs are checked as well.

    Raises:
        UserError: It is for another stage or version, or something in it is wrong.
    """
    if (request.stage, request.version) != (kind.stage, kind.version):
        raise UserError(
            f"the request is for {request.stage} version {request.version}, this program is "
            f"{kind.stage} version {kind.version}",
            _OTHER_VERSION,
        )
    try:
        params = kind.model_validate(request.params)
    except ValidationError as error:
        raise UserError(f"wrong parameters for {kind.stage}: {error}") from error
    if sha256_of(key_fields(params, request.seed, request.inputs)) != request.key:
        raise UserError(
            f"the request's key {request.key[:12]} is not the key of its content",
            "make requests with stages.contract.request.make_request",
        )
    return params.for_processor(this_processor(gpu=request.resources.gpus > 0))


def found_input(store: Store, name: str, source: Input) -> FoundInput:
    """Finds one input on this machine and checks that it is what the request names.

    Raises:
        UserError: A file from outside is not there, or was changed since the request was made.
        DamagedArtifactError: The store lacks the artifact, or has another content of it.
    """
    if isinstance(source, HubInput):
        return source
    if isinstance(source, FileInput):
        return _checked_file(name, source)
    artifact = store.load(source.stage, source.key, source.path)
    if artifact is None or artifact.manifest.digest(source.path) != source.digest:
        raise DamagedArtifactError(
            f"input {name!r}: the store has no artifact {source.stage}/{source.key[:12]} with "
            f"digest {source.digest[:12]}"
        )
    return artifact.path / source.path


def _checked_file(name: str, source: FileInput) -> Path:
    """Place of an external input, whose content is compared with the request's.

    A changed file would be cached under the old file's key.
    """
    path = Path(source.location)
    if not path.exists():
        raise UserError(f"input {name!r}: no such file or folder: {path}", "check the path")
    files = [path] if path.is_file() else files_of(path)
    size = sum(file.stat().st_size for file in files)
    seems_same = size > _HASHED_BYTES and source.state in (None, state_of(path))
    if not seems_same and digest_of(path) != source.digest:
        raise UserError(
            f"input {name!r}: {path} has changed since the run looked at it",
            "resume the run, which then reads it as it is now, or restore it",
        )
    return path
